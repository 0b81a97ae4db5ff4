"""Where there is no GPU, the kernels run in Triton's interpreter (``tests/conftest.py`` asks for it)."""

import numpy as np
import pytest

triton = pytest.importorskip("triton")  # its wheels are for Linux


@pytest.fixture(autouse=True)
def _bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widens the factors of the interpreter's matrix product: it multiplies the bit patterns of bfloat16.

    That widening is exact. The maintainers have declined to support it (triton-lang/triton, pull request 11585).
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def widened(handle: TensorHandle) -> TensorHandle:
        if handle.dtype.scalar != triton.language.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), triton.language.float32)

    product = InterpreterBuilder.create_dot
    monkeypatch.setattr(
        InterpreterBuilder, "create_dot", lambda self, a, b, *rest: product(self, widened(a), widened(b), *rest)
    )
