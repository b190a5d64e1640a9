"""C++ declarations of the products with weights of a body (``csrc/cuda/sparse/edge_products.cuh``)."""

from collections.abc import Iterable
from dataclasses import dataclass

AT = "int64_t row, int64_t source, int64_t edge, const float* products"
"""Parameters that tell an edge."""


@dataclass(frozen=True, slots=True)
class Product:
    """A product of an edge value with a weight, as C++.

    Attributes:
        inputs: columns of the operand.
        outputs: columns of the result.
        input: C++ statements that return a column of the operand.
        weight: C++ statements that return the weight's element at ``k`` and ``column``.
        bias: C++ statements that return a column of the bias.
    """

    inputs: int
    outputs: int
    input: str
    weight: str
    bias: str


def declared(found: Iterable[Product]) -> list[str]:
    """Return the declarations of a body's products."""
    products = list(found)
    lines = [f"static constexpr int kProducts = {len(products)};"]
    if not products:
        return lines
    for name, sizes in (
        ("inputs", [product.inputs for product in products]),
        ("outputs", [product.outputs for product in products]),
    ):
        chosen = "".join(f"product == {number} ? {size} : " for number, size in enumerate(sizes))
        lines.append(f"__host__ __device__ static constexpr int {name}(int product) {{ return {chosen}0; }}")
    for head, texts in (
        (f"input({AT}, int column)", [product.input for product in products]),
        ("weight(int k, int column)", [product.weight for product in products]),
        ("bias(int column)", [product.bias for product in products]),
    ):
        lines.append(f"template <int kProduct> __device__ float {head} const {{")
        lines += [f"  if constexpr (kProduct == {number}) {{ {text} }}" for number, text in enumerate(texts)]
        lines.append("}")
    return lines
