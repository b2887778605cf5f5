"""Trying a program without vLLM, as `rolltap doctor` does."""

from rolltap.trainer.doctor.diagnosis import Diagnosis as Diagnosis
from rolltap.trainer.doctor.examine import examine as examine

__all__ = ["Diagnosis", "examine"]
