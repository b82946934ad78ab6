"""Test flash attention of a prompt's chunk. The file imports only what the Python of a GPU machine has."""

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

from flexhybrid.runtime.kernels import attention


def chunk(heads: int, new: int, tokens: int, dtype, device: str = "cpu") -> list[torch.Tensor]:
    """Return queries, keys and values of a request whose last columns are new."""
    generator = torch.Generator().manual_seed(tokens)
    sizes = (1, new, heads, 16), (1, 2, tokens, 16), (1, 2, tokens, 16)
    return [torch.randn(*size, generator=generator).to(device, dtype) for size in sizes]


CHUNKS = (2, 5, 37), (6, 33, 70), (4, 8, 8)  #: query heads of two key heads, new tokens, columns


def test_a_chunk_attends_by_flash_attention_if_a_gpu_has_it(monkeypatch):
    """A stand-in on a CPU, with causal_lower_right's mask. Masked columns and unsupported heads use products."""
    calls = []

    def of_a_gpu(query, keys, values, dropout, causal, *, scale):
        calls.append((dropout, causal))
        bias = causal_lower_right(query.shape[2], keys.shape[2])._materialize()
        keys, values = (side.repeat_interleave(query.shape[1] // keys.shape[1], 1) for side in (keys, values))
        return (torch.nn.functional.scaled_dot_product_attention(query, keys, values, bias, scale=scale),)

    for heads, new, tokens in CHUNKS:
        operands = chunk(heads, new, tokens, torch.float32)
        context = attention.Assembled(*operands[1:])
        expected = attention.products(operands[0], context, 0.3)
        assert torch.equal(attention.flash(operands[0], context, 0.3), expected) and not calls  # a CPU has none
        with monkeypatch.context() as gpu:
            gpu.setattr(attention, "reads_groups", lambda *_: True)
            gpu.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", of_a_gpu)
            torch.testing.assert_close(attention.flash(operands[0], context, 0.3), expected, atol=1e-6, rtol=1e-5)
            assert calls == [(0.0, True)]
            mask = torch.zeros(1, 1, 1, tokens).index_fill_(3, torch.tensor([1]), -torch.inf)
            masked = operands[0], context._replace(mask=mask), 0.3
            assert torch.equal(attention.flash(*masked), attention.products(*masked))
            query, *odd = [of[..., :12] for of in operands]
            odd = query, attention.Assembled(*odd)
            assert torch.equal(attention.flash(*odd), attention.products(*odd)) and calls.pop()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gpus_flash_attention_aligns_the_last_columns(dtype):
    for size in CHUNKS:
        operands = chunk(*size, dtype, "cuda")
        context = attention.Assembled(*operands[1:])
        assert attention.reads_groups(operands[0].transpose(1, 2), *operands[1:])
        expected = attention.products(operands[0], context, 0.3)
        torch.testing.assert_close(attention.flash(operands[0], context, 0.3), expected, atol=2e-2, rtol=2e-2)
