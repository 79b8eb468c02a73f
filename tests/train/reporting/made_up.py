"""Records of a made-up run."""

from megatron_ext.train.reporting.records import EvaluationRecord, IterationRecord


def record_of(iteration: int = 12, **values: object) -> IterationRecord:
    fields: dict[str, object] = {
        "iteration": iteration,
        "num_iterations": 100,
        "consumed_samples": 192,
        "seconds": 0.5,
        "learning_rate": 0.0009140577,
        "global_batch_size": 16,
        "losses": {"lm loss": 7.422465},
        "loss_scale": 1.0,
        "grad_norm": 0.68417,
        "samples": 16,
        "tokens": 1024,
        "flops": 2e12,
        "world_size": 2,
    }
    return IterationRecord(**{**fields, **values})  # type: ignore[arg-type]


FULL = OSError(28, "No space left on device")

COMMON = {
    "train/loss": 7.422465,
    "train/lr": 0.0009140577,
    "train/grad_norm": 0.68417,
    "train/skipped_iterations": 2.0,
    "train/time(s)": 0.5,
}
VALIDATION = EvaluationRecord("validation", 12, {"lm loss": 3.5, "mtp_1 loss": 4.0})
