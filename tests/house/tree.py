"""The checkout as git will see it: what the tests of the house look at."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

FOLDERS = tuple(
    name
    for name in (
        "page",
        "wire",
        "tokens",
        "index",
        "policies",
        "pool",
        "worker",
        "router",
        "inferlet",
        "simulator",
        "cluster",
    )
    if (ROOT / name / "__init__.py").is_file()
)


def files() -> list[Path]:
    """Return every file that is tracked or would be, relative to `ROOT`."""
    # The owner of a checkout need not be who tests it.
    git = ["git", "-c", "safe.directory=*", "-C", str(ROOT)]
    listing = subprocess.run(
        [*git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    names = {Path(name) for name in listing.split("\0") if name}
    return sorted(name for name in names if (ROOT / name).is_file())


def package_files() -> list[Path]:
    """Return those of `files()` that belong to a package of ours."""
    return [file for file in files() if file.parts[0] in FOLDERS]
