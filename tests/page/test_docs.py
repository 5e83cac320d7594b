"""What the docs say about page files is so."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from pie.page.format import encode_page
from pie.page.header import FORMAT_VERSION
from tests.page.test_format import KEY, PAYLOAD, header_of

PAGE = (Path(__file__).parents[2] / "docs/page-format.md").read_text("utf-8")


def test_a_page_file_opens_with_plain_pyarrow_in_five_lines(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line for line in program.splitlines() if line and not line.startswith("import ")]
    assert len(lines) <= 5
    assert "pie" not in program.replace("pie.", "")
    (tmp_path / "open.py").write_text(program)
    (tmp_path / "page").write_bytes(encode_page(header_of(PAYLOAD), PAYLOAD))
    said = subprocess.run(
        [sys.executable, tmp_path / "open.py", tmp_path / "page"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert f"'pie.key': '{KEY.hex()}'" in said
    assert f"'pie.version': '{FORMAT_VERSION}'" in said
    assert str(np.frombuffer(PAYLOAD, np.uint8)) in said


def test_every_field_of_a_page_file_is_explained(tmp_path: Path) -> None:
    file = bytes(encode_page(header_of(PAYLOAD), PAYLOAD))
    named = {name.decode() for name in re.findall(rb"pie\.[a-z_]+", file)}
    assert len(named) > 10
    explained = set(re.findall(r"`(pie\.[a-z_]+)`", PAGE))
    assert named <= explained | {"pie.headerchecksum"}
