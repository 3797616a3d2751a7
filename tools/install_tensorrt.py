"""Installer of TensorRT 10.6 from Maven Central and PyPI.

    python -m tools.install_tensorrt [--jar FILE]

The vendor's own wheels need the vendor's index: ``pip install 'zinfer[tensorrt]' --extra-index-url
https://pypi.nvidia.com``. Either way TensorRT comes under the vendor's licence
(https://docs.nvidia.com/deeplearning/tensorrt/latest/reference/sla.html); zinfer distributes nothing of it.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from urllib.request import urlopen
from zipfile import ZipFile, ZipInfo

BINDINGS = "tensorrt-cu12-bindings==10.6.0.post2"
JAR = "https://repo1.maven.org/maven2/org/bytedeco/tensorrt/10.6-1.5.11/tensorrt-10.6-1.5.11-linux-x86_64-redist.jar"
SHA256 = "e7979693541f996bc284335b05f5e890a82b8b3aba50d680e1343a139cf291c4"
LIBRARIES = "libnvinfer.so.10", "libnvinfer_plugin.so.10", "libnvonnxparser.so.10"
RESOURCE = "libnvinfer_builder_resource.so.10.6.0"
INFO = "tensorrt-10.6.0.dist-info"
TEXTS = {
    "tensorrt/__init__.py": "from tensorrt_bindings import *\nfrom tensorrt_bindings import __version__\n",
    "tensorrt_libs/__init__.py": f"""import ctypes
from pathlib import Path

for name in {LIBRARIES}:
    ctypes.CDLL(str(Path(__file__).with_name(name)), mode=ctypes.RTLD_GLOBAL)
""",
    f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: tensorrt\nVersion: 10.6.0\nLicense: NVIDIA TensorRT SLA\n",
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-linux_x86_64\n",
}


def fetch(path: Path) -> None:
    """Download the jar to `path`. Raises OSError."""
    print(f"downloading {JAR} (1.1 GB)", file=sys.stderr)
    with urlopen(JAR) as source, path.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)


def check(path: Path) -> None:
    """End the program unless the jar is the one that was tested."""
    with path.open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != SHA256:
            raise SystemExit(f"{path} is not the jar of {JAR}")


def make_wheel(jar: Path, folder: Path) -> Path:
    """Write a wheel `tensorrt` with the libraries in `jar`; return its path. Raises KeyError if one is missing."""
    path = folder / "tensorrt-10.6.0-py3-none-linux_x86_64.whl"
    with ZipFile(jar) as archive, ZipFile(path, "w") as wheel:
        for name in (*LIBRARIES, RESOURCE):
            entry = archive.getinfo(f"org/bytedeco/tensorrt/linux-x86_64/{name}")
            with archive.open(entry) as source, wheel.open(ZipInfo(f"tensorrt_libs/{name}"), "w") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        for name, text in TEXTS.items():
            wheel.writestr(name, text)
        names = [*wheel.namelist(), f"{INFO}/RECORD"]
        wheel.writestr(f"{INFO}/RECORD", "".join(f"{name},,\n" for name in names))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Install TensorRT 10.6 into this environment.")
    parser.add_argument("--jar", type=Path, help="the jar, if it is here already")
    given = parser.parse_args().jar
    with tempfile.TemporaryDirectory() as folder:
        jar = given or Path(folder, "tensorrt.jar")
        if given is None:
            fetch(jar)
        check(jar)
        wheel = make_wheel(jar, Path(folder))
        subprocess.run([sys.executable, "-m", "pip", "install", "--no-deps", BINDINGS, str(wheel)], check=True)
    print("a build looks for its kernels where the loader looks; before `zinfer pack`:")
    print(f"export LD_LIBRARY_PATH={sysconfig.get_path('platlib')}/tensorrt_libs:$LD_LIBRARY_PATH")


if __name__ == "__main__":
    main()
