"""NumPyro: NUTS, two chains side by side on the devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Predictive

_Y = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
_SIGMA = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def _eight_schools(sigma: jax.Array, y: jax.Array | None = None) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", 8):
        theta = numpyro.sample(
            "theta", dist.TransformedDistribution(dist.Normal(0, 1), dist.transforms.AffineTransform(mu, tau))
        )
        numpyro.sample("obs", dist.Normal(theta, sigma), obs=y)


def samples_with_nuts() -> Any:
    sampler = MCMC(
        NUTS(_eight_schools),
        num_warmup=100,
        num_samples=100,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    sampler.run(jax.random.key(0), _SIGMA, y=_Y)
    drawn = sampler.get_samples()
    predicted = Predictive(_eight_schools, drawn)(jax.random.key(1), _SIGMA)
    # Long chains amplify the last digit of a sum; the first ones after the warm-up say what there is to say.
    return {
        "shape": list(drawn["theta"].shape),
        "is_finite": bool(jnp.isfinite(predicted["obs"]).all()),
        "mu": round(float(drawn["mu"].mean()), 0),
        "theta": [round(float(each), -1) for each in drawn["theta"].mean(0)],
    }


CHECKS = (samples_with_nuts,)
