"""The images' references and build contexts."""

from __future__ import annotations

import io
import re
import shutil
import tarfile
from pathlib import Path

import pytest

from e2e.images.catalogue import CHECKOUT, IMAGES, Image


@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES)
def test_every_copied_file_is_an_input(image: Image) -> None:
    """COPY of something that the context lacks would fail only in the build."""
    names = [path.relative_to(CHECKOUT).as_posix() for path in image.files()]
    for line in (CHECKOUT / image.dockerfile).read_text().splitlines():
        if line.startswith("COPY --from"):
            assert all(source.startswith("/") for source in line.split()[2:-1]), f"of another stage only: {line}"
        elif line.startswith("COPY"):
            for source in line.split()[1:-1]:
                assert any(name == source or name.startswith(f"{source}/") for name in names), source


@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES)
def test_dockerfiles_are_for_everyone(image: Image) -> None:
    """They start from Debian, end as a user that is not root, and know no machine, index, proxy or certificate."""
    text = (CHECKOUT / image.dockerfile).read_text()
    assert f"docker build -f {image.dockerfile} " in text.split("FROM")[0], "how to build it by hand"
    users = re.findall(r"^USER (.*)$", text, re.M)
    assert users == ["65532:65532"]
    bases = set(re.findall(r"^FROM (\S+)", text, re.M)) - set(re.findall(r" AS (\S+)$", text, re.M))
    assert bases == {"debian:bookworm-slim"}
    assert not re.search(r"https?://|PIP_|SSL_CERT|index-url|/root|/work|_proxy", text)


def copied(image: Image, target: Path) -> Path:
    for path in image.files():
        place = target / path.relative_to(CHECKOUT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    return target


def test_the_reference_follows_the_content(tmp_path: Path) -> None:
    image = IMAGES["operator"]
    checkout = copied(image, tmp_path)
    before = image.snapshot(checkout).ref
    assert before == image.snapshot().ref
    (checkout / "operator/sglang_rollout/__pycache__").mkdir(exist_ok=True)
    (checkout / "operator/sglang_rollout/__pycache__/x.pyc").write_bytes(b"x")
    assert image.snapshot(checkout).ref == before, "bytecode is no input"
    module = checkout / "operator/sglang_rollout/__init__.py"
    module.write_text(module.read_text() + "\n")
    assert image.snapshot(checkout).ref != before


def test_the_executable_bit_is_content(tmp_path: Path) -> None:
    image = IMAGES["agent"]
    checkout = copied(image, tmp_path)
    before = image.snapshot(checkout).ref
    (checkout / "images/agent/inject").chmod(0o600)
    assert image.snapshot(checkout).ref != before


def test_the_context_holds_the_inputs_and_nothing_of_this_machine() -> None:
    image = IMAGES["agent"]
    with tarfile.open(fileobj=io.BytesIO(image.snapshot().context)) as archive:
        members = archive.getmembers()
    assert [member.name for member in members] == [path.relative_to(CHECKOUT).as_posix() for path in image.files()]
    assert {(member.uid, member.gid, member.mtime, member.uname) for member in members} == {(0, 0, 0, "")}
    assert image.snapshot() == image.snapshot()


def test_a_missing_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"images/engine-cpu/Dockerfile: an input of the image engine-cpu"):
        IMAGES["engine-cpu"].snapshot(tmp_path)
