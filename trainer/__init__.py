"""From recorded calls to new weights: traces, advantages, GRPO, publishing, rollouts and the
`rolltap` command."""
