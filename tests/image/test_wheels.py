"""An environment is taken apart by what its packages say they brought, and nothing is left over unseen."""

from __future__ import annotations

import pytest

from shoal.image.wheels import Pin, normalise, partition, read_pins

SITE = "lib/python3.11/site-packages/"
HASH = "ab" * 32


def test_exact_lines_are_pins_in_one_order() -> None:
    lines = ["Zope.Interface==6.0", f"numpy == 2.3.5 --hash=sha256:{HASH}", "requests[socks]==2.32.0"]
    assert read_pins(lines) == (
        Pin("numpy", "2.3.5", (HASH,)),
        Pin("requests", "2.32.0"),
        Pin("zope-interface", "6.0"),
    )
    assert read_pins(["a==1", "A==1"]) == (Pin("a", "1"),)
    assert read_pins([]) == ()


@pytest.mark.parametrize(
    "line", ["numpy", "numpy>=1", "numpy==1.*", "a==1; python_version<'3.9'", "--no-binary :all:", "a @ file:///x"]
)
def test_anything_else_is_no_pin(line: str) -> None:
    assert read_pins(["b==1", line]) is None


def test_two_versions_of_one_package_are_no_pins() -> None:
    assert read_pins(["a==1", "a==2"]) is None


@pytest.mark.parametrize("name", ["Zope.Interface", "zope_interface", "zope--interface"])
def test_names_are_compared_as_the_index_does(name: str) -> None:
    assert normalise(name) == "zope-interface"


def test_a_line_gives_the_pin_back() -> None:
    pin = Pin("numpy", "2.3.5", (HASH,))
    assert read_pins([pin.line]) == (pin,)


RECORD_A = "a/__init__.py,,\na/data.txt,sha256=x,3\n../../../bin/a,,\na-1.dist-info/RECORD,,\nshared/x.py,,\n"
RECORD_B = 'shared/x.py,,\n"b,odd.py",,\nb-2.dist-info/RECORD,,\n'


def test_files_go_to_the_package_that_brought_them() -> None:
    files = [
        f"{SITE}a/__init__.py", f"{SITE}a/__pycache__/__init__.cpython-311.pyc", f"{SITE}a/data.txt", "bin/a",
        f"{SITE}a-1.dist-info/RECORD", f"{SITE}shared/x.py", f"{SITE}b,odd.py", f"{SITE}b-2.dist-info/RECORD",
        "pyvenv.cfg", f"{SITE}stray.py",
    ]  # fmt: skip
    records = {f"{SITE}a-1.dist-info/RECORD": RECORD_A, f"{SITE}b-2.dist-info/RECORD": RECORD_B}
    assert partition(files, records) == {
        "a": ["bin/a", *(SITE + name for name in (
            "a-1.dist-info/RECORD", "a/__init__.py", "a/__pycache__/__init__.cpython-311.pyc", "a/data.txt"))],
        "b": [SITE + name for name in ("b,odd.py", "b-2.dist-info/RECORD", "shared/x.py")],
        "": [f"{SITE}stray.py", "pyvenv.cfg"],
    }  # fmt: skip


@pytest.mark.parametrize("claim", ["../../../../../etc/passwd", "/etc/passwd", "a\0b", "", '"unclosed', ".."])
def test_a_record_claims_only_what_is_there(claim: str) -> None:
    place = f"{SITE}a-1.dist-info/RECORD"
    assert partition([place, "bin/x"], {place: f"{claim},,\n"}) == {"": ["bin/x", place]}
