"""The emulated device, told which activations a kernel may read before it waits for its producer."""

from __future__ import annotations

from collections.abc import Sequence

from emulator import EmulatedDevice
from ling_kernels.cuda.driver import Argument

# Places of such arguments: written several kernels earlier, and by none that may still run. (history and state; keys
# and values below the window, positions, length; norms side by side since their first use; the residual stream, to
# which a partial is added; the plan of the experts)
SETTLED = {
    "exchange_norm": (3,),
    **{f"exchange_norm_{ranks}": (4,) for ranks in (2, 4, 8)},
    **{f"experts_down_{form}": (3,) for form in ("8_9", "8_8", "16_10", "16_6", "16_5")},
    "linear_normed": (3,),
    "router_normed": (3,),
    "kda_verify_sums": (5, 6),
    "kda_verify_sums_uneven": (5, 6),
    "mla_query": (12,),
    "mla_attend_128_1": (3, 4),
    "mla_attend_128_3": (3, 4),
    "mla_attend_128_5": (3, 4),
    "mla_attend_64_1": (3, 4),
    "mla_merge": (3,),
    "mla_merge_values": (3,),
    "draft_heads": (2,),
    "draft_attend": (3, 4, 5),
    "draft_merge": (3,),
}


class SettledDevice(EmulatedDevice):
    """Lets those, and only those, be read early; a kernel that writes one of them fails."""

    def launch(
        self, name: str, grid: int | Sequence[int], block: int, args: Sequence[Argument], shared: int = 0
    ) -> None:
        before = dict(self._constants)
        settled = SETTLED.get(name, ())
        if name == "exchange_norm" and args[0] is None:
            settled = ()  # what it norms comes from the kernel before
        self.constant(*[args[at] for at in settled if args[at] is not None])
        try:
            super().launch(name, grid, block, args, shared)
        finally:
            self._constants = before
