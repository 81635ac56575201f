"""Requirements files: what names a release is understood, what reaches elsewhere is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import InvalidRequest
from shoal.image import requirements


def read(folder: Path, text: str) -> requirements.Requirements:
    file = folder / "requirements.txt"
    file.write_text(text)
    return requirements.read(file)


def test_comments_blanks_and_order_do_not_matter(tmp_path: Path) -> None:
    found = read(tmp_path, "# top\n\nflask  ==3.0.0   # why\nattrs==23.1\n  \nurl-like#fragment==1\n")
    assert found.requirements == ("attrs==23.1", "flask ==3.0.0", "url-like#fragment==1")


def test_lines_go_on_after_a_backslash(tmp_path: Path) -> None:
    text = "flask==3.0.0 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\nattrs\n"
    assert read(tmp_path, text).requirements == (
        "attrs",
        "flask==3.0.0 --hash=sha256:aa --hash=sha256:bb",
    )
    assert read(tmp_path, "flask \\").requirements == ("flask",)


def test_markers_extras_and_ranges(tmp_path: Path) -> None:
    lines = [
        "a[b,c]>=1,<2",
        'd==1; python_version < "3.9"',
        "e ~= 1.4",
        "f!=2",
        "g==1.*",
        "h>1 ; sys_platform=='linux'",
    ]
    assert read(tmp_path, "\n".join(lines)).requirements == tuple(sorted(lines))


def test_includes_are_relative_to_the_file_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/more.txt").write_text("attrs\n-r deep.txt\n-cpins.txt\n")
    (tmp_path / "sub/deep.txt").write_text("click\n")
    (tmp_path / "sub/pins.txt").write_text("attrs==23.1\n-r others.txt\n")
    (tmp_path / "sub/others.txt").write_text("click==8.1\n")
    found = read(tmp_path, "flask\n--requirement=sub/more.txt\n")
    assert found.requirements == ("attrs", "click", "flask")
    assert found.constraints == ("attrs==23.1", "click==8.1")


def test_options_that_uv_reads_from_the_file_stay(tmp_path: Path) -> None:
    assert read(tmp_path, "--no-binary :all:\n--require-hashes\n").requirements == (
        "--no-binary :all:",
        "--require-hashes",
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--index-url https://x.example/simple", "pip.conf"),
        ("-i https://x.example/simple", "pip.conf"),
        ("--extra-index-url=https://x.example", "pip.conf"),
        ("-f /srv/wheels", "pip.conf"),
        ("--find-links /srv/wheels", "pip.conf"),
        ("-e .", "workspace"),
        ("--editable=./x", "workspace"),
        ("./local", "workspace"),
        (".", "workspace"),
        ("/srv/x.whl", "workspace"),
        ("x-1.0-py3-none-any.whl", "workspace"),
        ("git+https://example.org/x.git", "workspace"),
        ("x @ https://example.org/x.tar.gz", "workspace"),
        ("file:///etc/passwd", "workspace"),
        ("x==${VERSION}", "variables"),
        ("--proxy http", "not a requirement"),
        ("==1.0", "not a requirement"),
        ("-r https://example.org/r.txt", "this machine"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        read(tmp_path, f"flask\n{line}\n")
    assert "line 2" in caught.value.field


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="can't be read"):
        requirements.read(tmp_path / "none.txt")
    with pytest.raises(InvalidRequest, match="which includes it"):
        read(tmp_path, "-r requirements.txt\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(InvalidRequest, match="can't be read"):
        requirements.read(tmp_path / "bytes.txt")


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfflask\r\nattrs\r\n")
    assert requirements.read(tmp_path / "bom.txt").requirements == ("attrs", "flask")
