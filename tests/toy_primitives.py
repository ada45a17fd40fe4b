"""Toy primitives with the attributes of real ones, and a small model with GPT-2's names."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field
from typing import Any, Literal

from torch import nn

from schedlang.ir.placement import Placement
from schedlang.ir.primitive import Primitive, isolated_registry, load_all, refuse
from schedlang.language.kinds import Axis, Rest


def define_toys() -> None:
    """Define the toys, which replace real primitives of the same names in this registry."""

    class shard(Primitive):
        """Split parameters."""

        style: Literal["col", "row", "vocab"] | None = None
        over: Axis = field(kw_only=True)
        blocks: int | tuple[int, ...] = 1
        output: Placement | None = None
        tensors: Rest[Placement] = ()
        example = "h  shard(col, over=tp)"
        reads = frozenset({"structure", "shape"})
        writes = frozenset({"placement"})
        gives_up = frozenset({"rounding"})

        def check(self, site: Any, plan: Any) -> None:
            size = plan.mesh.size(self.over)
            for name, parameter in site.parameters.items():
                if name == "weight" and parameter.shape[0] % size:
                    refuse(
                        "S402",
                        f"cannot split {parameter.shape[0]} evenly {size} ways",
                        f"`{self.over}` has {size} ranks",
                    )

    class pad(Primitive):
        """Pad a dim."""

        dim: str
        multiple: int
        example = "h  pad(vocab, multiple=8)"
        reads = frozenset({"structure"})
        writes = frozenset({"shape"})

        def check(self, site: Any, plan: Any) -> None:
            pass

    class checkpoint(Primitive):
        """Recompute."""

        save: tuple[str, ...] = ()
        example = "h  checkpoint()"
        reads = frozenset({"structure"})
        writes = frozenset({"recompute"})

        def check(self, site: Any, plan: Any) -> None:
            pass

    class replace_kernel(Primitive):
        """Swap a computation."""

        kernel: str
        rng: Literal["model", "philox"] = "model"
        example = "h  replace_kernel(sdpa)"
        reads = frozenset({"structure"})
        writes = frozenset({"structure"})

        @property
        def gives_up(self) -> frozenset[str]:
            return frozenset({"rounding"} | ({"rng"} if self.rng == "philox" else set()))

        def check(self, site: Any, plan: Any) -> None:
            pass

    class pipeline(Primitive):
        """Order the microbatches."""

        order: str
        micro: int
        example = 'pipeline(order="1F1B", micro=4)'
        takes = "model"
        reads = frozenset({"stage"})
        writes = frozenset({"order"})

        def check(self, site: Any, plan: Any) -> None:
            if any(action.name == "pipeline" for action in plan.actions):
                refuse("S509", "the pipeline already has an order")


@contextmanager
def only_toys() -> Iterator[None]:
    """A registry with only the toys and `verify`."""
    load_all()
    with isolated_registry(keep=["verify"]):
        define_toys()
        yield


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(8, 24), nn.Linear(8, 8)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(8, 32), nn.Linear(32, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.mlp = nn.LayerNorm(8), Attention(), MLP()


class Config:
    def __init__(self) -> None:
        self.n_head, self.n_layer = 4, 4


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(21, 8)
        self.h = nn.ModuleList(Block() for _ in range(4))


class GPT2LMHeadModel(nn.Module):
    """The names of GPT-2, four small layers, a tied head and an odd vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.transformer = Transformer()
        self.lm_head = nn.Linear(8, 21, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
