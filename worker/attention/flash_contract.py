"""What a flash kernel may assume of its arguments, and what it owes, in plain PyTorch.

Covers a kernel that refuses whatever a compiled one would refuse or, worse, would read wrongly, and
computes the rest one sequence at a time. It stands in for a GPU wherever there is none. Does not
cover how fast a kernel is, or its rounding beyond that of weights to the model's dtype.

The checks are those of `mha_varlen_fwd` in flash-attn 2.8.3 and in vLLM's fork of it, and what both
read without checking: lengths, page numbers, and pages of a tile behind a sequence's end.
"""

from __future__ import annotations

import torch

from pie.worker.attention.flash import (
    HEAD_DIM_MULTIPLE,
    MOST_HEAD_DIM,
    TILE_TOKENS,
    VarlenBatch,
)


class ContractBroken(Exception):  # noqa: N818
    """A kernel on a GPU would refuse this call, or read what it must not."""


class ContractKernel:
    """A flash kernel without a GPU.

    It takes float32 as well, which no compiled one does: a wrong layout can't hide in rounding.
    """

    name = "contract"
    devices = frozenset({"cpu", "cuda"})
    dtypes = frozenset({torch.float32, torch.float16, torch.bfloat16})

    def __init__(self, page_multiple: int = 16) -> None:
        self.page_multiple = page_multiple
        self.paged_calls = 0
        """Calls that brought a block table."""

    def attend(
        self,
        batch: VarlenBatch,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        *,
        scaling: float,
        window: tuple[int, int],
        softcap: float,
    ) -> None:
        """See `FlashKernel.attend`.

        Raises:
            ContractBroken: Says what.
        """
        self._check_tensors(batch, query, keys, values, out)
        self._check_lengths(batch, query, keys)
        left, right = window
        _expect(left >= -1 and right >= -1 and softcap >= 0, f"window {window}, softcap {softcap}")
        self.paged_calls += batch.block_table is not None
        group = query.shape[1] // keys.shape[-2]
        starts = batch.cu_seqlens_q.tolist()
        key_starts = batch.cu_seqlens_k.tolist()
        for index, used in enumerate(batch.seqused_k.tolist()):
            rows = slice(starts[index], starts[index + 1])
            if batch.block_table is None:
                own = slice(key_starts[index], key_starts[index + 1])
                k, v = keys[own], values[own]
            else:
                pages = batch.block_table[index].long()
                k, v = (t[pages].flatten(0, 1)[:used] for t in (keys, values))
            q = query[rows].transpose(0, 1)
            k, v = (t.repeat_interleave(group, 1).transpose(0, 1) for t in (k, v))
            logits = (q.float() @ k.float().transpose(1, 2)) * scaling
            if softcap:
                logits = torch.tanh(logits / softcap) * softcap
            # Causal, aligned to the end: the last query is the last key's.
            at = torch.arange(used - q.shape[1], used, device=q.device)[:, None]
            slots = torch.arange(used, device=q.device)
            hidden = slots > at
            if left >= 0:
                hidden |= slots < at - left
            weights = torch.softmax(logits.masked_fill(hidden, float("-inf")), -1)
            out[rows] = (weights.to(v.dtype) @ v).transpose(0, 1)

    def _check_tensors(
        self,
        batch: VarlenBatch,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        _expect(query.dtype in self.dtypes, f"dtype {query.dtype}")
        floats = {"query": query, "keys": keys, "values": values, "out": out}
        for name, tensor in floats.items():
            _expect(tensor.dtype is query.dtype, f"{name} in {tensor.dtype}, not {query.dtype}")
            _expect(tensor.stride(-1) == 1, f"the last dimension of {name} is not contiguous")
        ints = [batch.cu_seqlens_q, batch.cu_seqlens_k, batch.seqused_k]
        ints += [] if batch.block_table is None else [batch.block_table]
        for tensor in ints:
            _expect(tensor.dtype is torch.int32, f"lengths or pages in {tensor.dtype}, not int32")
            _expect(tensor.is_contiguous(), "lengths or pages are not contiguous")
        devices = {tensor.device for tensor in (*floats.values(), *ints)}
        _expect(len(devices) == 1, f"tensors on several devices: {devices}")
        rows, heads, dim = query.shape
        kv_heads = keys.shape[-2]
        _expect(out.shape == query.shape, f"out {tuple(out.shape)} for {tuple(query.shape)}")
        _expect(keys.shape == values.shape, "keys and values of different shapes")
        _expect(keys.dim() == (3 if batch.block_table is None else 4), f"{keys.dim()}-D keys")
        _expect(keys.shape[-1] == dim, f"heads of {keys.shape[-1]} for heads of {dim}")
        _expect(dim <= MOST_HEAD_DIM and dim % HEAD_DIM_MULTIPLE == 0, f"heads of {dim}")
        _expect(heads % kv_heads == 0, f"{heads} query heads over {kv_heads}")
        _expect(rows > 0, "no queries")

    def _check_lengths(self, batch: VarlenBatch, query: torch.Tensor, keys: torch.Tensor) -> None:
        used = batch.seqused_k
        _expect(used.dim() == 1 and len(used) > 0, f"lengths of shape {tuple(used.shape)}")
        for sums, total in ((batch.cu_seqlens_q, len(query)), (batch.cu_seqlens_k, None)):
            _expect(sums.shape == (len(used) + 1,), f"sums of shape {tuple(sums.shape)}")
            _expect(int(sums[0]) == 0 and bool((sums.diff() > 0).all()), "sums do not rise from 0")
            _expect(total is None or int(sums[-1]) == total, f"sums end at {sums[-1]}, not {total}")
        queries = batch.cu_seqlens_q.diff()
        _expect(torch.equal(batch.cu_seqlens_k.diff(), used), "two different lengths of keys")
        _expect(bool((queries <= used).all()), "more queries than keys")
        _expect(batch.max_seqlen_q == int(queries.max()), f"max_seqlen_q {batch.max_seqlen_q}")
        _expect(batch.max_seqlen_k == int(used.max()), f"max_seqlen_k {batch.max_seqlen_k}")
        table = batch.block_table
        if table is None:
            _expect(len(keys) == int(used.sum()), f"{len(keys)} keys, lengths say {used.sum()}")
            return
        pages, page_tokens = keys.shape[:2]
        _expect(page_tokens % self.page_multiple == 0, f"pages of {page_tokens}")
        _expect(table.dim() == 2 and len(table) == len(used), f"a table {tuple(table.shape)}")
        tiles = -(-batch.max_seqlen_k // TILE_TOKENS) * TILE_TOKENS
        _expect(table.shape[1] * page_tokens >= tiles, f"a table {table.shape[1]} pages wide")
        _expect(bool(((table >= 0) & (table < pages)).all()), "a page outside of the arena")


def _expect(kept: bool, what: str) -> None:
    if not kept:
        raise ContractBroken(what)
