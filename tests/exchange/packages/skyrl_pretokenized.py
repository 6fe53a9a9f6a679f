"""Reads an export as SkyRL's `pretokenized_dataset_paths` does: skyrl_pretokenized.py DATA [CHECKOUT].

The reader came after release 0.3. It is taken from a checkout of SkyRL, where one is given, else from the package; null
is printed if the package has none. Its file and that of its base class are loaded without the rest of the package.
"""

import importlib.util
import json
import sys
import types
from pathlib import Path


def loaded(root: Path, name: str) -> types.ModuleType:
    """A module of SkyRL, from its file alone."""
    place = root.joinpath(*name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, place)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    root = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(importlib.util.find_spec("skyrl").origin).parent.parent
    if not (root / "skyrl/train/dataset/pretokenized.py").exists():
        print("null")
        sys.exit()
    for package in ("skyrl", "skyrl.train", "skyrl.train.dataset"):
        sys.modules[package] = types.ModuleType(package)
    loaded(root, "skyrl.train.dataset.sft_dataset")
    rows = loaded(root, "skyrl.train.dataset.pretokenized").load_from_pretokenized(sys.argv[1], max_length=None)
    print(json.dumps([rows[number] for number in range(len(rows))]))
