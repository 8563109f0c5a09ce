"""What changes a kernel's digest, and what does not."""

from dsparkgen.digest import code_digest, imported, kernel_digest

FILES = {
    "p/_device/__init__.py": "",
    "p/_device/keys.py": "from .words import WIDTH\nBITS = 8\n",
    "p/_device/words.py": "WIDTH = 32\n",
    "p/_device/other.py": "X = 1\n",
    "p/m/__init__.py": "from importlib import import_module\n",
    "p/m/config.py": '"""Constants."""\n\nA = 1  # an origin\n',
    "p/m/chain.py": '"""Kernel."""\nfrom .._device import keys\nfrom . import config\n\n\ndef run(x):\n    """Doc."""\n    return x + config.A\n',
    "p/m/noise.py": "from . import config\n",
}


def _digest(**changes: str) -> str:
    files = {**FILES, **{f"p/{name.replace('__', '/')}.py": text for name, text in changes.items()}}
    return kernel_digest(files, "m", "chain", package="p")


def test_a_kernel_imports_transitively() -> None:
    assert imported(FILES, ("p/m/chain.py",)) == (
        "p/_device/keys.py",
        "p/_device/words.py",
        "p/m/chain.py",
        "p/m/config.py",
    )


def test_comments_docstrings_and_layout_do_not_count() -> None:
    text = "# Header\nfrom .._device import keys\nfrom . import config\ndef run( x ):\n    # why\n    return (x + config.A)\n"
    assert _digest(m__chain=text) == _digest()
    assert _digest(m__config="A = 1\n") == _digest()
    assert len(_digest()) == 12 and int(_digest(), 16) >= 0


def test_code_counts_wherever_it_is() -> None:
    changed = [
        _digest(m__chain=FILES["p/m/chain.py"].replace("+", "-")),
        _digest(m__config="A = 2\n"),
        _digest(_device__keys="from .words import WIDTH\nBITS = 9\n"),
        _digest(_device__words="WIDTH = 64\n"),
    ]
    assert len({_digest(), *changed}) == 5


def test_what_the_kernel_does_not_import_does_not_count() -> None:
    assert _digest(_device__other="X = 2\n") == _digest()
    assert _digest(m__noise="X = 2\n") == _digest()


def test_values_of_another_type_count() -> None:
    assert len({code_digest({"a.py": f"A = {value}\n"}) for value in ("1", "1.0", "True", "'1'", "b'1'")}) == 5
    assert code_digest({"a.py": "f('', 1)"}) != code_digest({"a.py": "f(1)"})


def test_digests_are_the_same_on_every_python() -> None:
    """Recorded runs are compared on other machines: a new Python must not change old digests."""
    text = "def f(x, *y, z=(1, 2.5), **k):\n    return f'{x!r:>{z}}' if x else [i for i in y if not k]\n"
    assert code_digest({"a.py": text}) == "6106c8ed293f"
