"""The flash kernels of installed packages.

Covers finding `vllm.vllm_flash_attn`, `vllm_flash_attn` or `flash_attn`, calling what each of them
names `flash_attn_varlen_func`, and trying it on the device before it is used. Does not cover how a
step is laid out for it (`pie.worker.attention.flash`).

The packages' functions differ in order, in names and, from version to version, in what they take,
so all arguments go by name and a function is asked which it has.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable
from functools import cache

import torch

from pie.worker.attention import conformance
from pie.worker.attention.flash import FlashBackend, VarlenBatch

log = logging.getLogger("pie.worker.attention.flash")

PACKAGES = {"vllm.vllm_flash_attn": 16, "vllm_flash_attn": 16, "flash_attn": 256}
"""Modules in order of preference, and the multiple that each wants of tokens in a page."""

CHECKED = ("decode", "mixed", "window", "softcap")

_NEEDED = frozenset(
    {
        "q",
        "k",
        "v",
        "block_table",
        "causal",
        "cu_seqlens_k",
        "cu_seqlens_q",
        "max_seqlen_k",
        "max_seqlen_q",
        "softcap",
        "softmax_scale",
        "window_size",
    }
)


class FlashUnavailable(Exception):  # noqa: N818
    """Why there is no flash kernel here, as part of a sentence."""


class PackageKernel:
    """`flash_attn_varlen_func` of one package."""

    dtypes = frozenset({torch.float16, torch.bfloat16})

    def __init__(
        self,
        name: str,
        function: Callable[..., torch.Tensor],
        page_multiple: int,
        *,
        version: int | None = None,
        devices: frozenset[str] = frozenset({"cuda"}),
    ) -> None:
        """Look at what the function takes.

        Args:
            name: The module's.
            function: Its `flash_attn_varlen_func`.
            page_multiple: See `FlashKernel`.
            version: vLLM's `fa_version`; None leaves it to the function.
            devices: Where the function runs.

        Raises:
            FlashUnavailable: The function is too old.
        """
        taken = inspect.signature(function).parameters
        missing = sorted(_NEEDED - taken.keys())
        if missing:
            raise FlashUnavailable(f"{name} is too old: it has no {', '.join(missing)}")
        self.name = name
        self.page_multiple = page_multiple
        self.devices = devices
        self._function = function
        self._takes_out = "out" in taken
        self._takes_used = "seqused_k" in taken
        self._version = {"fa_version": version} if version and "fa_version" in taken else {}

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
        """See `FlashKernel.attend`."""
        # vLLM's wants one of the two: lengths with a block table, sums without.
        lengths: dict[str, torch.Tensor | None] = {"cu_seqlens_k": batch.cu_seqlens_k}
        if self._takes_used and batch.block_table is not None:
            lengths = {"cu_seqlens_k": None, "seqused_k": batch.seqused_k}
        result = self._function(
            q=query,
            k=keys,
            v=values,
            cu_seqlens_q=batch.cu_seqlens_q,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            softmax_scale=scaling,
            causal=True,
            window_size=window,
            softcap=softcap,
            block_table=batch.block_table,
            **lengths,
            **({"out": out} if self._takes_out else {}),
            **self._version,
        )
        if not self._takes_out:
            out.copy_(result)


def kernel(module_name: str) -> PackageKernel:
    """Return the kernel of one of `PACKAGES`.

    Raises:
        FlashUnavailable: It is not installed, does not load, or is too old.
    """
    if importlib.util.find_spec(module_name.partition(".")[0]) is None:
        raise FlashUnavailable(f"{module_name} is not installed")
    try:
        module = importlib.import_module(module_name)
        function = module.flash_attn_varlen_func
        version = _version(module)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        line = next(iter(str(error).splitlines()), type(error).__name__)
        raise FlashUnavailable(f"{module_name} does not load ({line})") from error
    return PackageKernel(module_name, function, PACKAGES[module_name], version=version)


def flash_backend(dtype: torch.dtype, device: torch.device) -> FlashBackend:
    """Return the backend of the first package whose kernel passes the check on this device.

    The first call on a device takes seconds: packages are imported and kernels run.

    Raises:
        FlashUnavailable: There is none; says why of each package.
    """
    if device.type != "cuda":
        raise FlashUnavailable(f"flash kernels run on CUDA, and the model is on {device.type}")
    if not torch.cuda.is_available():
        raise FlashUnavailable("there is no CUDA here")
    if dtype not in PackageKernel.dtypes:
        raise FlashUnavailable(
            f"flash kernels do float16 and bfloat16, and the model is in {dtype}"
        )
    reasons: list[str] = []
    for name in PACKAGES:
        try:
            return FlashBackend(_checked(name, device))
        except FlashUnavailable as error:
            reasons.append(str(error))
    raise FlashUnavailable("; ".join(reasons))


@cache
def _checked(name: str, device: torch.device) -> PackageKernel:
    """Refuse a kernel that fails on this device, or computes wrongly."""
    found = kernel(name)
    check(FlashBackend(found), device)
    return found


def check(backend: FlashBackend, device: torch.device) -> None:
    """Run a part of the suite.

    Raises:
        FlashUnavailable: The kernel fails or is wrong; says how.
    """
    for case in conformance.CASES:
        if case.name in CHECKED and case.dtype in backend.capabilities.dtypes:
            try:
                conformance.run(backend, case, device)
            except (RuntimeError, TypeError, AssertionError) as error:
                line = next(iter(str(error).splitlines()), type(error).__name__)
                name = backend.kernel.name
                log.warning("the attention kernel of %s is not used: %s", name, line)
                raise FlashUnavailable(f"{name} fails here ({line})") from error


def _version(module: object) -> int | None:
    """Return the FlashAttention that vLLM's package should run: 3 where it can, else 2."""
    supported = getattr(module, "is_fa_version_supported", None)
    if supported is None:
        return None
    return 3 if supported(3) else 2
