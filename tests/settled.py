"""The emulated device, told which activations a kernel may read before it waits for its producer.

When a kernel has finished, so have all before it, for each of its threads waits. A kernel begins when those before it
let it: the last of them that does so late, after its own wait, says that all before that one have finished. So what is
read early needs such a kernel between its writer and its reader. An early read of anything newer finds here what stood
there before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from emulator import EmulatedDevice
from ling_kernels.cuda.driver import Argument

# Places of such arguments: written by none that may still run. (history and state; keys
# and values below the window, positions, length; norms side by side since their first use; the residual stream, to
# which a partial is added; the plan of the experts; a sequence's words and drafts)
SETTLED = {
    "exchange_norm": (3,),
    "exchange_norm_look": (3,),
    **{f"exchange_norm_{form}{ranks}": (4,) for form in ("", "look_") for ranks in (2, 4, 8)},
    **{f"experts_down_{form}": (3,) for form in ("8_9", "8_8", "16_10", "16_6", "16_5")},
    **{f"experts_down_{form}_look": (3,) for form in ("8_9", "8_8")},
    "linear_normed": (3,),
    "linear_normed_look": (3,),
    "router_normed": (3,),
    "router_normed_look": (3,),
    **{f"kda_verify_sums{form}": (5, 6, 14, 15) for form in ("", "_uneven", "_look", "_uneven_look")},
    "kda_follow_layers": (0,),
    "mla_query": (12,),
    "mla_attend_128_1": (3, 4),
    "mla_attend_128_3": (3, 4),
    "mla_attend_128_5": (3, 4),
    "mla_attend_64_1": (3, 4),
    "mla_merge": (3,),
    "mla_merge_values": (3,),
    "sample_verdict": (2, 3, 4, 5, 6),
    "sample_verdict_best": (6, 7, 8, 9, 10),
    "draft_heads": (2,),
    "draft_attend": (3, 4, 5),
    "draft_merge": (3,),
}

# The same of arguments that the kernel itself writes, after its wait, where each block has read its own part alone; and
# the place of an argument that has to be there for it.
OWN = {
    **{f"kda_verify_sums{form}": (6, 14) for form in ("", "_uneven", "_look", "_uneven_look")},
    "kda_follow_layers": (1, 4),
}

# Places of arguments that are looked for: what stands there is blank until it comes.
LOOKED = {
    "exchange_norm_look": (0,),
    **{f"exchange_norm_look_{ranks}": (1,) for ranks in (2, 4, 8)},
    **{f"linear_{tokens}_look": (0,) for tokens in (8, 16)},
    "linear_normed_look": (0,),
    **{f"linear_part_{tokens}_look": (0,) for tokens in (8, 16)},
    **{f"linear_part_normed_{tokens}_look": (0, 3) for tokens in (8, 16)},
    **{f"router_{form}_look": (0,) for form in ("8", "16", "row_1", "row_2")},
    **{f"route_select_{tokens}_look": (0, 11) for tokens in (8, 16)},
    **{f"experts_gate_up_{tokens}_look": (0, 2) for tokens in (8, 16)},
    "router_normed_look": (0,),
    "experts_choose_gate_up_1_look": (0, 2),
    "experts_choose_gate_up_4_look": (0, 2),
    "experts_down_8_9_look": (0,),
    "experts_down_8_8_look": (0,),
    "kda_verify_sums_look": (4,),
    "kda_verify_sums_uneven_look": (4,),
}


class TorchKernels(TorchDispatchMode):
    """Torch's kernels wait for all before them as a whole, and let nothing start before they end."""

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in func.name():  # a view, and memory, is no kernel
            self.device.settle()
        return func(*args, **kwargs or {})


class SettledDevice(EmulatedDevice):
    """Lets those, and only those, be read early; a kernel that writes one of them fails, but for OWN after its wait."""

    @contextmanager
    def in_order(self) -> Iterator[SettledDevice]:
        """With what torch launches between."""
        with TorchKernels(self):
            yield self

    def launch(
        self, name: str, grid: int | Sequence[int], block: int, args: Sequence[Argument], shared: int = 0
    ) -> None:
        before = dict(self._constants)
        settled = SETTLED.get(name, ())
        if name == "exchange_norm" and args[0] is None:
            settled = ()  # what it norms comes from the kernel before
        early = [args[at] for at in settled if args[at] is not None]
        self._looked = [(args[at], False) for at in LOOKED.get(name, ())]
        if name.startswith("experts_down") and _storage(args[3]) == _storage(args[4]):  # the plan beside the result
            self._looked.append((args[3], True))
        else:
            self.constant(*early)
        own, given = OWN.get(name, (0, None))
        if given is not None and args[given] is not None:
            self._own = {args[own].untyped_storage().data_ptr()}
        try:
            super().launch(name, grid, block, args, shared)
        finally:
            self._constants, self._own, self._looked = before, set(), []


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
