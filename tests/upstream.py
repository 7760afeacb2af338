"""Modules of other projects, from their wheels, without what they depend on."""

import importlib.abc
import importlib.util
import subprocess
import sys
import tempfile
import zipimport
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

FOLDER = Path(tempfile.gettempdir()) / "jax_ep_wheels"


def wheel(name: str, version: str) -> Path:
    """The wheel of a release, whichever Python it asks for; skips the test where pip has none."""
    if not (found := list(FOLDER.glob(f"{name.replace('-', '_')}-{version}-*.whl"))):
        options = ("--no-deps", "--only-binary=:all:", "--python-version=3.12", "--retries=0", f"--dest={FOLDER}", "-q")
        command = [sys.executable, "-m", "pip", "download", *options, f"{name}=={version}"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        found = list(FOLDER.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
        if run.returncode or not found:
            pytest.skip(f"pip finds no {name} {version}")
    return found[0]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules `real` in a wheel; the rest of its package, and of the packages `absent`, are mocks."""

    def __init__(self, file: Path, real: Sequence[str], absent: Sequence[str]):
        self.zip = zipimport.zipimporter(str(file))
        self.real, self.mocked = real, {*absent, real[0].partition(".")[0]}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] in self.mocked:
            return importlib.util.spec_from_loader(fullname, self, is_package=fullname not in self.real)
        return None

    def create_module(self, spec: Any) -> Any:
        return None if spec.name in self.real else MagicMock(name=spec.name, __path__=[], __spec__=spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in self.real:
            source = self.zip.get_data(f"{self.zip.archive}/{module.__name__.replace('.', '/')}.py")
            exec(compile(source, module.__name__, "exec"), vars(module))


def load(file: Path, real: Sequence[str], absent: Sequence[str]) -> ModuleType:
    """The first of the modules `real`. They stay in `sys.modules`, without the mocks of other packages."""
    sys.meta_path.insert(0, finder := Finder(file, real, absent))
    try:
        return [importlib.import_module(name) for name in reversed(real)][-1]  # first what the first one imports
    finally:
        sys.meta_path.remove(finder)
        for name, module in [*sys.modules.items()]:
            if name.partition(".")[0] in absent and isinstance(module, MagicMock):
                del sys.modules[name]
