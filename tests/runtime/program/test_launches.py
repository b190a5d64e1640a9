"""Records of a program: each prints its line, and says which names it reads and writes."""

import ast
from pathlib import Path

import pytest

import gnnc
from gnnc.runtime.program.launches import (
    Allocate,
    Call,
    Columns,
    Counters,
    Expr,
    Launch,
    Let,
    Statement,
    Take,
    Unpacked,
    View,
    Zero,
    count_of,
    expr,
    literal,
    sequence,
    tuple_of,
    variable,
)

x, out, runs, n0 = map(variable, ("x_1", "out_2", "runs_3", "n0"))


def address(tensor: Expr) -> Expr:
    return expr("{}.data_ptr()", tensor)


@pytest.mark.parametrize(
    ("statement", "text", "reads", "writes"),
    [
        (
            Launch("launch_4", n0, (address(x), address(out.written), literal(5))),
            "launch_4(n0, stream, x_1.data_ptr(), out_2.data_ptr(), 5)",
            "launch_4 n0 x_1 out_2",
            "out_2",
        ),
        (
            Launch("launch_4", literal(2), (Unpacked(expr("{}.fields", runs), 6), literal(0))),
            "launch_4(2, stream, *runs_3.fields, 0)",
            "launch_4 runs_3",
            "",
        ),
        (
            Call("gemm_5", (x, literal(None), out.written)),
            "gemm_5(x_1, None, out_2)",
            "gemm_5 x_1 out_2",
            "out_2",
        ),
        (
            Call("op_5", (x,), (("dim", literal(-1)), ("out", out.written)), "v_6"),
            "v_6 = op_5(x_1, dim=-1, out=out_2)",
            "op_5 x_1 out_2",
            "v_6 out_2",
        ),
        (Take("out_2", n0, 7, "dtype_1"), "out_2 = take((n0, 7), dtype_1)", "n0 dtype_1", "out_2"),
        (
            Allocate("t_3", (n0, literal(8)), "dtype_1"),
            "t_3 = empty((n0, 8), dtype=dtype_1)",
            "n0 dtype_1",
            "t_3",
        ),
        (
            Allocate("s_3", (expr("{} * 8", n0),), "dtype_1"),
            "s_3 = empty((n0 * 8,), dtype=dtype_1)",
            "n0 dtype_1",
            "s_3",
        ),
        (
            Counters("arrived_3", expr("{}.slots * 2", runs)),
            "arrived_3 = counters(arena, runs_3.slots * 2)",
            "runs_3",
            "arrived_3",
        ),
        (View("v_3", "out_2", (n0, literal(2))), "v_3 = out_2.view((n0, 2,))", "out_2 n0", "v_3"),
        (View("v_3", "out_2", ()), "v_3 = out_2.view(())", "out_2", "v_3"),
        (Columns("t_3", "out_2", 7), "t_3 = out_2[:, :7]", "out_2", "t_3"),
        (Let("m_3", expr("{}.contiguous()", x)), "m_3 = x_1.contiguous()", "x_1", "m_3"),
        (Zero("t0"), "t0.zero_()", "t0", "t0"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Statement) else "",
)
def test_a_statement_prints_its_line_and_knows_its_names(
    statement: Statement, text: str, reads: str, writes: str
) -> None:
    assert statement.text == text
    assert statement.reads == tuple(reads.split()) and statement.writes == tuple(writes.split())
    names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    functions_of_the_arena = {"stream", "arena", "take", "empty", "counters"}
    assert {*statement.reads, *statement.writes} == names - functions_of_the_arena


def test_a_launch_is_recorded_with_the_same_grid_and_arguments() -> None:
    launch = Launch("launch_4", n0, (expr("{}.data_ptr()", x), Unpacked(expr("{}.fields", runs), 6)))
    assert launch.recorded == "launch_4.record(n0, recorded, x_1.data_ptr(), *runs_3.fields)"
    assert count_of(launch.arguments) == 7


def test_an_expression_keeps_the_names_of_its_parts() -> None:
    rows = expr("({} + {}) // {}", expr("{}.shape[0]", x), 255, 256)
    assert rows == Expr("(x_1.shape[0] + 255) // 256", ("x_1",))
    both = tuple_of([out.written, rows, None, 0.5])
    assert both.text == "(out_2, (x_1.shape[0] + 255) // 256, None, 0.5, )"
    assert both.reads == ("out_2", "x_1") and both.writes == ("out_2",)
    assert sequence([x, n0, x]) == Expr("x_1, n0, x_1", ("x_1", "n0"))
    assert tuple_of([]).text == "()"


def test_an_expression_does_not_become_text_by_accident() -> None:
    with pytest.raises(TypeError, match=r"'x_1' is an expression with names"):
        f"{x}.data_ptr()"


def test_nobody_reads_program_text_back() -> None:
    """Patterns in the runtime are for C++ headers, messages of kernels and names of architectures alone."""
    root = Path(gnnc.__file__).parent / "runtime"
    importing = {
        file.relative_to(root).as_posix()
        for file in root.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if (isinstance(node, ast.Import) and any(name.name == "re" for name in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module == "re")
    }
    files = {"cpu/structure.py", "cuda/backend.py", "cuda/driver/kernel_set.py", "cuda/driver/nvrtc.py"}
    assert importing <= files
