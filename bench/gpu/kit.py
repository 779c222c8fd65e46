"""python -m bench.gpu.kit DIR: packs SGLang and what it needs beside torch, transformers and aiohttp into one archive
of about 50 MiB, for a GPU machine (x86-64, CPython 3.12, torch 2.11 of CUDA 13) without a network.

There: mkdir SITE && tar xJf DIR/site.tar.xz -C SITE, then PYTHONPATH=SITE:.:operator python3 -m bench.gpu.
Left out: kernels for other GPUs and of FlashAttention, FlashInfer's sources. The flags in settings.py need none."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PYTHON = "3.12"
GLIBC = ("35", "34", "31", "28", "27", "26", "24", "17")
REQUIREMENTS = Path(__file__).with_name("kit-requirements.txt")
LEFT_OUT = (
    "sglang/multimodal_gen/",
    "sglang/test/",
    "sgl_kernel/flash_ops",
    "sgl_kernel/flashmla_ops",
    "sgl_kernel/infllm_ops",
    "sgl_kernel/sm100/",
    "xgrammar/lib/",
    "xgrammar/include/",
    "flashinfer/data/",
    "flashinfer/_build_meta_data/",
)
# sgl_kernel takes FlashInfer's norms when it can import it; they are compiled from the sources that are left out.
NORMS = Path("sgl_kernel/elementwise.py")
DOWNLOAD_SECONDS = 1800


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        wheels, site = Path(scratch) / "wheels", Path(scratch) / "site"
        _download(wheels)
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site, [name for name in archive.namelist() if not name.startswith(LEFT_OUT)])
        norms = site / NORMS
        text = norms.read_text()
        assert "    _has_flashinfer = True" in text, f"{NORMS} of this release is another: look at its imports"
        norms.write_text(text.replace("    _has_flashinfer = True", "    _has_flashinfer = False"))
        for library in site.rglob("*.so"):
            subprocess.run(["strip", "--strip-debug", str(library)], check=False, timeout=60, capture_output=True)
        archive_path = out / "site.tar.xz"
        packing = ["tar", "--create", "--xz", "--file", str(archive_path), "--directory", str(site), "."]
        subprocess.run(packing, check=True, timeout=DOWNLOAD_SECONDS)
    print(f"{archive_path}: {archive_path.stat().st_size >> 20} MiB")
    return 0


def _download(folder: Path) -> None:
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--python-version", PYTHON, "--implementation", "cp"]
    for platform in platforms:
        command += ["--platform", platform]
    command += ["--dest", str(folder), "--requirement", str(REQUIREMENTS)]
    subprocess.run(command, check=True, timeout=DOWNLOAD_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
