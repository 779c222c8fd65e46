"""Docker archives: names as given, tags before the manifest, the same bytes for the same content."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

from e2e.cluster.archive import ImageSource, write_archive


def _root(folder: Path, content: str) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/program").write_text(content)
    (folder / "link").symlink_to("bin/program")
    return folder


def test_archive_has_every_image_under_its_full_name(tmp_path: Path) -> None:
    one, two = _root(tmp_path / "one", "1"), _root(tmp_path / "two", "2")
    names = ["docker.io/kindest/kindnetd:v1", "registry.example:5000/pause:3.10"]
    images = [ImageSource(names[0], one, entrypoint=("/bin/program",)), ImageSource(names[1], two)]
    write_archive(tmp_path / "images.tar", images)
    with tarfile.open(tmp_path / "images.tar") as archive:
        members = archive.getnames()
        assert members.index("repositories") < members.index("manifest.json")
        read = {name: archive.extractfile(name) for name in members}
        content = {name: stream.read() for name, stream in read.items() if stream}
    manifest = json.loads(content["manifest.json"])
    assert [entry["RepoTags"] for entry in manifest] == [[name] for name in names]
    repositories = json.loads(content["repositories"])
    assert set(repositories) == {"docker.io/kindest/kindnetd", "registry.example:5000/pause"}
    for entry in manifest:
        layer = content[entry["Layers"][0]]
        config = json.loads(content[entry["Config"]])
        assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
        assert entry["Config"] == f"{hashlib.sha256(content[entry['Config']]).hexdigest()}.json"
    assert json.loads(content[manifest[0]["Config"]])["config"]["Entrypoint"] == ["/bin/program"]


def test_layer_keeps_links_and_belongs_to_root(tmp_path: Path) -> None:
    write_archive(tmp_path / "a.tar", [ImageSource("x:1", _root(tmp_path / "root", "1"))])
    with tarfile.open(tmp_path / "a.tar") as archive:
        layer = archive.extractfile(next(name for name in archive.getnames() if name.endswith("layer.tar")))
        with tarfile.open(fileobj=layer) as files:
            members = {member.name: member for member in files}
    assert set(members) == {"bin", "bin/program", "link"}
    assert members["link"].linkname == "bin/program"
    assert {member.uid for member in members.values()} == {0}


def test_images_of_the_same_content_share_a_layer(tmp_path: Path) -> None:
    roots = [_root(tmp_path / name, "same") for name in ("one", "two")]
    write_archive(tmp_path / "a.tar", [ImageSource(f"x:{tag}", root) for tag, root in enumerate(roots)])
    with tarfile.open(tmp_path / "a.tar") as archive:
        assert sum(name.endswith("layer.tar") for name in archive.getnames()) == 1


def test_same_content_gives_the_same_archive(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_archive(tmp_path / f"{name}.tar", [ImageSource("x:1", _root(tmp_path / name, "same"))])
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()
