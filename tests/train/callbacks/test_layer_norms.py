"""The norms of layers add up to the norm of all parameters in every layout."""

from pathlib import Path

import pytest

from tests.training_runs import train, training_rows

FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data "
    "--max-position-embeddings 16 --micro-batch-size 1 --tokenizer-type NullTokenizer "
    "--vocab-size 63 --global-batch-size 2 --train-iters 2 --lr 1e-3 --num-workers 0 "
    "--eval-iters 0 --log-interval 1 --log-params-norm --log-layer-norms-interval 2"
)
LAYOUTS = {
    "one rank": (1, ""),
    "tp2 pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
                "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce"),
}  # fmt: skip


def norms(save: Path, name: str) -> dict[str, float]:
    ranks, more = LAYOUTS[name]
    rows = train(f"{FLAGS} {more}", save, ranks)
    (found,) = [row for row in rows if row["kind"] == "evaluation"]
    assert (found["split"], found["iteration"]) == ("layers", 2)
    named = {key: value for key, value in found.items() if key.startswith("norm of")}
    assert list(named) == [
        *(f"norm of layer {number}" for number in range(1, 5)), "norm of all other parameters"
    ]  # fmt: skip
    whole = sum(value**2 for value in named.values()) ** 0.5
    assert whole == pytest.approx(training_rows(rows)[-1]["params_norm"], rel=1e-6)
    return named


@pytest.mark.parametrize("name", LAYOUTS)
def test_norms_of_layers_add_up_to_that_of_all_parameters(name: str, tmp_path: Path) -> None:
    *layers, _ = norms(tmp_path, name).values()
    # The layers are of one size, and begin with other weights.
    assert layers == pytest.approx([layers[0]] * 4, rel=0.01)
    assert len(set(layers)) == 4
