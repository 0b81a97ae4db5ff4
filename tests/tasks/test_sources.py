from pathlib import Path

import pytest

from tasks.sources import Sources, source_digest

PACKAGE = {
    "tasks/__init__.py": "",
    "tasks/caching.py": """
class Work:
    folder = "kept"

def stage(name=None):
    return lambda function: function
""",
    "tasks/near.py": "def nearby():\n    return 5\n\ndef beside():\n    return 6\n",
    "tasks/job.py": '''
"""The job."""

import math
from functools import partial as fill

import core.constants as constants
import core.deep.far
from core import exported
from core.middle import through as passed
from core.shapes import Circle
from core.star import *
from tasks import caching
from tasks.caching import Work

from .near import nearby

LIMIT: int = 3
LIMIT += 1
NAMES, SIZES = ["a"], [1, 2]
try:
    import accelerated as quick
except ImportError:
    quick = None
if LIMIT > 3:
    def chosen():
        return "above"
else:
    def chosen():
        return "below"


def unrelated():
    return "unrelated"


@caching.stage()
def job(work: Work, *, kind: "Kind", half: float = constants.HALF) -> None:
    """Does the job."""
    from core.late import inside

    total = passed(LIMIT) + inside() + nearby()  # a comment
    text = f"{shown(total):{width()}}"
    later = lambda: in_lambda()
    many = [in_comprehension() for _ in SIZES]
    if (found := in_walrus()) and chosen():
        match found:
            case constants.MATCHED:
                return core.deep.far.reached()
    work.keep(Circle(), exported(), from_star(), quick, text, later, many, math.pi, fill)


class Kind:
    pass


def shown(total):
    return total


def width():
    return 10


def in_lambda():
    return 1


def in_comprehension():
    return 2


def in_walrus():
    return 3
''',
    "core/__init__.py": "from .origin import original as exported\n",
    "core/origin.py": "def original():\n    return 'original'\n\ndef other():\n    return 'other'\n",
    "core/constants.py": "HALF = 0.5\nMATCHED = 7\nUNUSED = 8\n",
    "core/middle.py": """
from core.end import last

def through(count):
    return through(count - 1) if count else last(count)
""",
    "core/end.py": """
import core.middle

def last(count):
    return core.middle.through(count - 1) if count else 0

def unused(count):
    return count
""",
    "core/shapes.py": """
from core.decorators import registered

PI = 3

class Shape:
    def area(self):
        return 0

@registered
class Circle(Shape):
    def area(self):
        return PI

    def grow(self):
        return self
""",
    "core/decorators.py": "def registered(what):\n    return what\n",
    "core/late.py": "def inside():\n    return 4\n",
    "core/star.py": "def from_star():\n    return 9\n\ndef not_from_star():\n    return 10\n",
    "core/deep/__init__.py": "",
    "core/deep/far.py": "FLAGS = {}\n\ndef reached():\n    return 1\n\ndef out_of_reach():\n    return 2\n",
    "core/alone.py": "print('imported by nobody')\n",
}
CHANGES = {
    "its own body": ("tasks/job.py", "work.keep(", "work.keep(None, "),
    "a helper's module-level name": ("tasks/job.py", "return total", "return total + 1"),
    "a format specification's function": ("tasks/job.py", "return 10", "return 11"),
    "a name in a lambda": ("tasks/job.py", "return 1\n", "return -1\n"),
    "a name in a comprehension": ("tasks/job.py", "return 2\n", "return -2\n"),
    "a name in an assignment expression": ("tasks/job.py", "return 3\n", "return -3\n"),
    "a pattern's constant": ("core/constants.py", "MATCHED = 7", "MATCHED = 8"),
    "an annotated constant": ("tasks/job.py", "LIMIT: int = 3", "LIMIT: int = 4"),
    "an augmented constant": ("tasks/job.py", "LIMIT += 1", "LIMIT += 2"),
    "one of two constants of one assignment": ("tasks/job.py", "[1, 2]", "[1, 3]"),
    "a definition in a block": ("tasks/job.py", '"below"', '"beneath"'),
    "an import in a block": ("tasks/job.py", "import accelerated as", "import fastest as"),
    "an annotation in quotation marks": ("tasks/job.py", "class Kind:\n    pass", "class Kind:\n    size = 1"),
    "a default value": ("core/constants.py", "HALF = 0.5", "HALF = 0.25"),
    "the type of a number": ("core/constants.py", "MATCHED = 7", "MATCHED = 7.0"),
    "a helper two modules away, under another name": ("core/end.py", "else 0", "else 1"),
    "a name exported again": ("core/origin.py", "'original'", "'changed'"),
    "another name exported under the same": ("core/__init__.py", "original as", "other as"),
    "a base class": ("core/shapes.py", "return 0", "return 1"),
    "a method": ("core/shapes.py", "return self", "return None"),
    "a constant that a method uses": ("core/shapes.py", "PI = 3", "PI = 3.14"),
    "a decorator": ("core/decorators.py", "return what", "return lambda: what"),
    "an import inside the function": ("core/late.py", "return 4", "return 40"),
    "a relative import": ("tasks/near.py", "return 5", "return 50"),
    "a module's attribute by its dotted path": ("core/deep/far.py", "return 1", "return 10"),
    "a name imported by a star": ("core/star.py", "return 9", "return 90"),
    "what a foreign name stands for": ("tasks/job.py", "from functools import partial", "from functools import reduce"),
    "what one of ours stands for": ("tasks/job.py", "import nearby", "import beside as nearby"),
    "a statement of an imported module": ("core/deep/far.py", "FLAGS = {}", "FLAGS = {}\nFLAGS['on'] = True"),
    "a statement of a package on the way": ("core/deep/__init__.py", "", "print('imported')\n"),
    "a statement of a module imported inside": ("core/late.py", "def", "print('imported')\n\ndef"),
    "a global that the function adds to": (
        "tasks/near.py",
        "    return 5",
        "    global CALLS\n    CALLS += 1\n    return 5",
    ),
    "a global set by another function": (
        "core/late.py",
        "def inside():\n    return 4",
        "def inside():\n    return 4 + STATE\n\ndef set_state():\n    global STATE\n    STATE = 1",
    ),
}
NO_CHANGES = {
    "a comment": ("tasks/job.py", "# a comment", "# another"),
    "a docstring": ("tasks/job.py", '"""Does the job."""', '"""Does it."""'),
    "a docstring where there was none": ("core/late.py", "def inside():", 'def inside():\n    """Is inside."""'),
    "a module's docstring": ("tasks/job.py", '"""The job."""', ""),
    "layout": (
        "tasks/job.py",
        "total = passed(LIMIT) + inside() + nearby()",
        "total = (\n        passed( LIMIT, )\n\n        + inside() + nearby()\n    )",
    ),
    "quotation marks": ("core/origin.py", "'original'", '"orig" "inal"'),
    "an f-string's layout": ("tasks/job.py", 'f"{shown(total):{width()}}"', "f'{ shown(total) :{width( )}}' ''"),
    "an unrelated function of the same module": ("tasks/job.py", '"unrelated"', '"changed"'),
    "an unused constant beside a used one": ("core/constants.py", "UNUSED = 8", "UNUSED = 9"),
    "an unused function two modules away": ("core/end.py", "return count\n", "return -count\n"),
    "an unused function of a module imported whole": ("core/deep/far.py", "return 2", "return 3"),
    "an unused function of a module imported by a star": ("core/star.py", "return 10", "return 11"),
    "a function that used to be exported": ("core/origin.py", "'other'", "'changed'"),
    "infrastructure": ("tasks/caching.py", '"kept"', '"elsewhere"'),
    "a statement of infrastructure": ("tasks/caching.py", "class Work", "print('imported')\n\nclass Work"),
    "a module that nobody imports": ("core/alone.py", "print('", "print('still "),
    "the order of definitions": ("core/constants.py", "HALF = 0.5\nMATCHED = 7", "MATCHED = 7\nHALF = 0.5"),
    "an import that is not used": ("tasks/job.py", "import math\n", "import math\nimport json\n"),
}


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def digest(root: Path, function: str = "tasks.job.job") -> str:
    return source_digest(Sources([root]).covered(function))


def digest_after(root: Path, edit: tuple[str, str, str]) -> str:
    file, old, new = edit
    assert old in PACKAGE[file]
    write(root, PACKAGE | {file: PACKAGE[file].replace(old, new, 1)})
    return digest(root)


@pytest.mark.parametrize("edit", CHANGES.values(), ids=CHANGES)
def test_the_digest_changes_with(edit: tuple[str, str, str], tmp_path: Path) -> None:
    write(tmp_path, PACKAGE)
    before = digest(tmp_path)
    assert digest_after(tmp_path, edit) != before


@pytest.mark.parametrize("edit", NO_CHANGES.values(), ids=NO_CHANGES)
def test_the_digest_does_not_change_with(edit: tuple[str, str, str], tmp_path: Path) -> None:
    write(tmp_path, PACKAGE)
    before = digest(tmp_path)
    assert digest_after(tmp_path, edit) == before


def test_what_is_covered_is_named_and_its_digests_tell_what_changed(tmp_path: Path) -> None:
    write(tmp_path, PACKAGE)
    before = Sources([tmp_path]).covered("tasks.job.job")
    digest_after(tmp_path, CHANGES["a helper two modules away, under another name"])
    after = Sources([tmp_path]).covered("tasks.job.job")
    assert set(before) == {
        *(f"core.constants.{name}" for name in ("HALF", "MATCHED")),
        *("core.decorators.registered", "core.deep.far.reached", "core.end.last", "core.late.inside"),
        *("core.middle.through", "core.origin.original", "core.star.from_star"),
        *(f"core.shapes.{name}" for name in ("Circle", "PI", "Shape")),
        *(f"tasks.job.{name}" for name in ("Kind", "LIMIT", "SIZES", "chosen", "job", "quick", "shown", "width")),
        *(f"tasks.job.in_{name}" for name in ("comprehension", "lambda", "walrus")),
        "tasks.near.nearby",
    }
    assert {name for name in before if before[name] != after[name]} == {"core.end.last"}


@pytest.mark.parametrize(
    "use",
    ["from core import constants\nf = constants", "import core.constants as c\nf = vars(c)", "import core\nf = [core]"],
)
def test_a_module_used_as_a_value_counts_whole(use: str, tmp_path: Path) -> None:
    write(tmp_path, PACKAGE | {"tasks/job.py": use})
    covered = Sources([tmp_path]).covered("tasks.job.f")
    assert {f"core.constants.{name}" for name in ("HALF", "MATCHED", "UNUSED")} <= set(covered)


def test_an_attribute_that_a_module_does_not_define_counts_as_the_whole_module(tmp_path: Path) -> None:
    write(tmp_path, PACKAGE | {"tasks/job.py": "import core.constants as c\nf = c.made_at_run_time"})
    assert "core.constants.UNUSED" in Sources([tmp_path]).covered("tasks.job.f")


def test_modules_that_import_a_name_from_each_other_end(tmp_path: Path) -> None:
    write(tmp_path, {"one.py": "from two import f\nfrom one import g\n", "two.py": "from one import f\ndef h(): f()\n"})
    assert set(Sources([tmp_path]).covered("two.h")) == {"two.h"}


def test_a_package_that_exports_its_own_module_is_followed_into_it(tmp_path: Path) -> None:
    files = {"core/__init__.py": "from core import sub\nfrom . import sub", "core/sub.py": "def f(): return 1"}
    write(tmp_path, files | {"job.py": "from core import sub\ndef job(): return sub.f()"})
    assert set(Sources([tmp_path]).covered("job.job")) == {"job.job", "core.sub.f"}


def test_a_function_that_is_not_there_is_named(tmp_path: Path) -> None:
    write(tmp_path, PACKAGE)
    with pytest.raises(ValueError, match=r"tasks\.job\.jobs"):
        Sources([tmp_path]).covered("tasks.job.jobs")


def test_stages_are_found_by_their_decorator_alone(tmp_path: Path) -> None:
    decorated = """
from tasks import caching as kept
from tasks.caching import stage as step
from elsewhere import stage

@step(name="first")
def one(work):
    global SEEN
    SEEN = work

@kept.stage()
def two(work): pass

@stage()
def not_ours(work): pass

def three(work):
    @step()
    def inner(work): pass
"""
    write(tmp_path, PACKAGE | {"tasks/more.py": decorated + "raise RuntimeError('imported')\n"})
    assert Sources([tmp_path]).stages() == ["tasks.job.job", "tasks.more.one", "tasks.more.two"]


def test_the_digest_is_the_same_in_every_python(tmp_path: Path) -> None:
    write(tmp_path, PACKAGE)
    assert digest(tmp_path) == "9c2fe771c18642abbeb30b588c617288a6918e4023a68c51e1172eb72d607496"
