"""Budgets of a session, which the recorder holds."""

from pydantic import BaseModel, ConfigDict, Field


class Budget(BaseModel):
    """Budgets of one session. None is no limit. A session that used one up has the status `budget`.

    Attributes:
        calls: Model calls.
        sampled_tokens: Sampled tokens of all calls together.
        prompt_tokens: Tokens of the prompt of one call. A longer one is refused as by a model with that window, so that
            harnesses compact their history.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    calls: int | None = Field(default=None, ge=1)
    sampled_tokens: int | None = Field(default=None, ge=1)
    prompt_tokens: int | None = Field(default=None, ge=1)

    def options(self) -> dict[str, str]:
        """Return the recorder's options (`rolltap_max_calls` and others) of the budgets that are set."""
        return {f"rolltap_max_{name}": str(value) for name, value in self.model_dump(exclude_none=True).items()}
