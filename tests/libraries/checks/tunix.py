"""Tunix: its Llama 3, at toy size, is fine-tuned by its trainer, fsdp and tensor axes across the slices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.llama3 import model as llama
from tunix.sft import peft_trainer

from checks import mesh

_LENGTH, _BATCH, _STEPS = 16, 8, 6


def _batches() -> Any:
    random = np.random.default_rng(0)
    for _ in range(_STEPS):
        # Sequences that count up: each token tells the next.
        tokens = (random.integers(0, 64, (_BATCH, 1)) + np.arange(_LENGTH)) % 64
        yield peft_trainer.TrainingInput(
            input_tokens=tokens.astype(np.int32), input_mask=np.ones((_BATCH, _LENGTH), np.int32)
        )


def _for_model(batch: peft_trainer.TrainingInput) -> dict[str, Any]:
    positions = jnp.broadcast_to(jnp.arange(_LENGTH), (_BATCH, _LENGTH))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((_LENGTH, _LENGTH), bool)), (_BATCH, _LENGTH, _LENGTH))
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": positions,
        "attention_mask": mask,
    }


def _loss(model: Any, input_tokens: Any, input_mask: Any, positions: Any, attention_mask: Any) -> jax.Array:
    logits, _ = model(input_tokens, positions, None, attention_mask)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], input_tokens[:, 1:]).mean()


def fine_tunes_a_decoder() -> Any:
    on = mesh(4, 2, names=("fsdp", "tp"))
    config = llama.ModelConfig(
        num_layers=2,
        vocab_size=64,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-5,
    )
    with on:

        @nnx.jit
        def make() -> llama.Llama3:
            made = llama.Llama3(config, rngs=nnx.Rngs(params=0))
            state = nnx.state(made)
            nnx.update(made, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
            return made

        model = make()
        laid = str(model.embedder.input_embedding.get_value().sharding.spec)
        loss_of = nnx.jit(_loss)
        first = _for_model(next(_batches()))
        losses = [loss_of(model, **first)]
        trainer = peft_trainer.PeftTrainer(
            model,
            optax.adamw(1e-2),
            peft_trainer.TrainingConfig(eval_every_n_steps=1000, max_steps=_STEPS),
        ).with_gen_model_input_fn(_for_model)
        trainer.train(list(_batches()))
        losses.append(loss_of(model, **first))
    return {
        "losses": losses,
        "has_learnt": bool(losses[1] < losses[0] - 0.3),
        "laid": laid,
        "steps": trainer.train_steps,
    }


CHECKS = (fine_tunes_a_decoder,)
