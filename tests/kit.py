"""Small random models in float64 for the tests. Weights are so large that logits differ widely."""

import torch

from dflash import DraftConfig
from dmtp import ARMS, Arm, Drafter
from model import KV, Config, Llama
from mtp import MTP

TWO_ANCHORS = ARMS["conditioned-2"]  # T1 is known, but no state is handed over


def small_config(**changes) -> Config:
    """Four layers of width 32, four query and two key/value heads, 23 tokens, 48 positions."""
    settings = dict(vocab_size=23, context=48, n_layer=4, width=32, n_head=4, n_kv_head=2,
                    head_dim=8, mlp_width=48)
    return Config(**{**settings, **changes})


def randomise(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Every parameter away from its initial value, norm gains and initial zeros too; float64."""
    generator = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        noise = torch.randn(p.shape, generator=generator)
        p.data = (1 + 0.3 * noise if p.dim() == 1 else noise * p.size(-1) ** -0.5).double()
    return module.double()


def small_models(seed: int = 0, cfg: Config | None = None) -> tuple[Llama, MTP]:
    cfg = cfg or small_config()
    return randomise(Llama(cfg), seed), randomise(MTP(cfg), seed + 1)


def small_drafter(cfg: Config, arm: str | Arm, seed: int = 2, **changes) -> Drafter:
    """Two draft layers; `changes` are DraftConfig's fields."""
    draft = DraftConfig(**{**dict(tap_layers=(1, 2, 3), n_layer=2, n_slots=8), **changes})
    return randomise(Drafter(cfg, draft, ARMS[arm] if isinstance(arm, str) else arm), seed)


def every_layer(*caches: KV) -> list[torch.Tensor]:
    """Keys and values of all layers, (B, L, G, D) each."""
    return [layer for kv in caches for part in kv for layer in part]


def random_tokens(*shape: int, vocab_size: int = 23, seed: int = 3) -> torch.Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))
