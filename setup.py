"""Maps the folders onto the `pie` namespace: `page/` is imported as `pie.page`."""

from pathlib import Path

from setuptools import find_packages, setup

names = ["page", "wire", "tokens", "index", "policies", "pool", "worker", "router"]
names += ["inferlet", "simulator", "cluster"]
folders = {f"pie.{name}": name for name in names if Path(name, "__init__.py").is_file()}
inner = [f"{package}.{sub}" for package, f in folders.items() for sub in find_packages(f)]
setup(packages=[*folders, *inner], package_dir=folders)
