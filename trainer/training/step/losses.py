"""Parts of the loss besides TRL's: weights between engine and trainer, and a teacher."""

from torch import Tensor


def importance_weights(
    difference: Tensor,
    mode: str,
    low: float | None,
    high: float | None,
) -> Tensor:
    """Return the weights exp(trainer - engine), from differences of log-probabilities (B, S).

    They are those of tokens, (B, S), or of sessions, (B, 1), whose differences are summed; beyond a
    limit the limit itself, or 0. Source: TRL 1.16, `GRPOTrainer._generate_and_score_completions`.
    """
    level, _, action = mode.partition("_")
    if level == "sequence":
        difference = difference.sum(-1, keepdim=True)
    weights = difference.exp()
    limited = weights.clamp(low or 0.0, high)
    if action == "truncate":
        return limited
    # not a product with 0: a weight may be infinite
    return weights.masked_fill(weights != limited, 0.0)


def teacher_loss(
    logprobs: Tensor,
    sampled: Tensor,
    teacher: Tensor,
    mask: Tensor,
    limit: float,
) -> Tensor:
    """Return the sum over tokens of the reverse KL divergence from a teacher, with the gradient of
    its estimate.

    That is the gradient of a reward log p_teacher - log p_trainer of each token, weighted by the
    ratio to the probability that the token was `sampled` with, at most `limit`. All are (B, S),
    and log-probabilities but the mask. Source: "On-Policy Distillation", Thinking Machines, 2025.
    """
    now = logprobs.detach()
    ratio = (now - sampled).exp().clamp(max=limit)
    reward = teacher - now
    return -(ratio * reward * mask * logprobs).sum()
