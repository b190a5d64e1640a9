"""The rule for the first sentence of a docstring, and the search for sentences that break it.

A first sentence never begins with a pronoun or a bare relative: "It holds …", "What …", "Those …", "Of …".
The first sentence of a function has a verb. Either its first word is one, imperative or third person
("Return the rows."), or a noun phrase is followed by one ("A gate reads the value."). A class, a module, an
attribute or a property may be a noun phrase that names the thing ("Cache of values derived from a
tensor."). Verbs are those of ``VERBS`` and ``AUXILIARIES``: a new one is added there, if it says what code
does. A sentence of ``BLANK`` is refused, too.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

BARE = frozenset(
    """
    he her hers him his how it its itself nobody none of ones other others she that their theirs them
    themselves these they this those we what whatever when where whether which who whoever whom whose
    why you
    """.split()
)
"""Words that no first sentence begins with; ``one`` may, but as a number before a noun only."""

AUXILIARIES = frozenset(
    """
    am are be can cannot could did do does had has have is may might must shall should was were will
    would
    """.split()
)

VERBS = frozenset(
    """
    abort accept accumulate acquire add adopt advance aggregate align allocate allow annotate answer
    append apply approximate arrange ask assemble assert assign attach average avoid begin belong
    benchmark bind block bound break bring broadcast build cache calibrate call cancel capture carry
    cast catch change check choose clamp clear clone close collect combine compare compile complete
    compute concatenate configure connect construct contain continue convert copy correct cost count
    create cut deal decide declare decline decode dedent define delete dequantize derive describe detach
    determine diagnose differ differentiate disable discard dispatch divide draw drop dump emit emulate
    enable encode end ensure enter equal erase estimate evaluate exchange exclude execute exit expand
    explain export extend extract fail fetch fill filter find finish fit fix flatten fold follow force
    forget format free freeze fuse gather generate get give go group grow guard handle hash have hoist
    hold hook identify ignore include index infer insert inspect install instrument intersect invalidate
    invert join keep know launch lay lead leave let lift limit list load locate lock look loop lower
    make map mark mask match materialize mean measure merge mirror mock move multiply name need
    normalize note occur offer open order overwrite own pack pad parse partition pass patch perform
    permute pin place plan plot point poison pop predict prepare print produce profile propagate prove
    provide prune push put quantize raise randomize read rebuild receive recompute record recover reduce
    refer refuse register reject release remember remove rename render repeat replace replay report
    represent request require reserve reset reshape resize resolve restore restrict return reuse rewrite
    round run sample save say scale scan scatter score search see seed select send separate serve set
    shape share shift show shrink simplify simulate skip slice snapshot solve sort specialize specify
    spill split squeeze stack start state stay step stop store strip stub submit subtract sum suppress
    swallow swap switch sync synchronize take tell test tighten time total touch trace track train
    transfer transform translate transpose traverse trigger trim try tune turn undo unify unpack unwrap
    update use validate verify view visit wait walk warm warn wrap write yield zero
    """.split()
)


def third_person(verb: str) -> str:
    """Return the third person of a verb: ``writes``, ``passes``, ``carries``."""
    if verb == "have":
        return "has"
    if verb.endswith(("s", "x", "z", "ch", "sh", "o")):
        return verb + "es"
    return verb[:-1] + "ies" if re.search("[^aeiou]y$", verb) else verb + "s"


BLANK = re.compile(r"write the (call|launch)(es|s)?", re.IGNORECASE)
"""First sentences that leave open what is called or launched."""

FINITE = AUXILIARIES | {third_person(verb) for verb in VERBS}


def first_sentence(docstring: str) -> str:
    """Return a docstring up to its first full stop before a space, or its first empty line."""
    paragraph = docstring.strip().partition("\n\n")[0]
    return re.split(r"(?<=[.?!])\s", paragraph)[0]


def complaint(docstring: str, *, needs_verb: bool) -> str | None:
    """Return what is wrong with the first sentence of a docstring, or None."""
    words = re.findall(r"[A-Za-z][\w'-]*", re.sub(r"``[^`]*``|`[^`]*`", "X", first_sentence(docstring)))
    if not words:
        return "no sentence"
    first, *rest = (word.lower() for word in words)
    if first.partition("'")[0] in BARE or (first == "one" and (not rest or rest[0] in BARE | {"for", "to"})):
        return f"begins with {words[0]!r}"
    if BLANK.fullmatch(first_sentence(docstring).rstrip(".")):
        return "does not say which"
    if needs_verb and first not in VERBS | FINITE and not FINITE.intersection(rest):
        return "has no verb"
    return None


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, str, bool]]:
    """Yield line, name, text and whether a verb is needed, of each docstring of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                name = getattr(node, "name", "module")
                yield getattr(node, "lineno", 1), name, text, _is_called(node)
            yield from _attribute_docstrings(node)


def _is_called(node: ast.AST) -> bool:
    """Return whether a node is a function that is called, not read as an attribute or given as a fixture."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    return re.search("property|fixture", decorators) is None


def _attribute_docstrings(owner: ast.AST) -> Iterator[tuple[int, str, str, bool]]:
    body = getattr(owner, "body", [])
    for assignment, node in zip(body, body[1:], strict=False):
        if isinstance(assignment, ast.Assign | ast.AnnAssign) and isinstance(node, ast.Expr):
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                target = assignment.targets[0] if isinstance(assignment, ast.Assign) else assignment.target
                yield node.lineno, ast.unparse(target), node.value.value, False


def offenders(path: Path) -> list[str]:
    """Return a line for each docstring of a file whose first sentence breaks the rule."""
    tree = ast.parse(path.read_text())
    return [
        f"{path}:{line}: {name}: {problem}: {first_sentence(text)}"
        for line, name, text, needs_verb in docstrings(tree)
        if (problem := complaint(text, needs_verb=needs_verb))
    ]
