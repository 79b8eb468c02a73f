"""Launch scripts are read as bash would expand them, and what they leave open stays named."""

import subprocess
from pathlib import Path

import pytest

from megatron_ext.errors import DataError
from megatron_ext.inspect.audit.expand import readable
from megatron_ext.inspect.audit.script import read_script, read_text

RUN = "torchrun --nproc_per_node 8 pretrain_gpt.py"
VARIANTS = {
    "continued lines": f"{RUN} \\\n  --num-layers 4 \\\n  --bf16\n",
    "arrays": f'A=(\n --num-layers 4 # layers\n # --fp16\n)\nA+=("--bf16")\n{RUN} "${{A[@]}}"',
    "star": f"A=(--num-layers 4 --bf16)\n{RUN} ${{A[*]}}",
    "a string of options": f'options=" \\\n --num-layers 4 \\\n --bf16"\n{RUN} ${{options}}',
    "added to a string": f'X="--num-layers 4"\nX+=" --bf16"\n{RUN} $X',
    "defaults": f"N=${{N:-4}}\n: ${{D:=--bf16}}\n{RUN} --num-layers $N $D",
    "arithmetic": f"L=2\n{RUN} --num-layers $((L * 2 + 0)) --bf16",
    "arithmetic of several": f"G=2; N=2; W=$(($G*$N))\n{RUN} --num-layers $W --bf16",
    "expr and backquotes": f"W=`expr 2 \\* 2`\n{RUN} --num-layers $W --bf16",
    "a branch that is taken": f'S=a\nif [ "$S" = a ]; then N=4; else N=8; fi\n'
    f"{RUN} --num-layers $N --bf16",
    "elif": "S=3\nif [[ $S -gt 5 ]]; then N=8; elif (( S == 3 )); then N=4; fi\n"
    f"{RUN} --num-layers $N --bf16",
    "case": f'S=7b\ncase "$S" in\n "1b") N=2;;\n 7b|8b) N=4 ;;\n *) exit 1;;\nesac\n'
    f"{RUN} --num-layers $N --bf16",
    "a function": f'go() {{ local x="$1"; shift; {RUN} --num-layers "$1" $x; }}\ngo --bf16 4',
    "all arguments of a function": f'function go {{\n {RUN} "$@"\n}}\ngo --num-layers 4 --bf16',
    "a function that prints": f'f() {{ echo "--num-layers 4"; }}\n{RUN} $(f) --bf16',
    "a heredoc in a variable": f"O=$(cat <<EOF\n--num-layers 4\n--bf16\nEOF\n)\n{RUN} $O",
    "read from a heredoc": f"read -r -d '' O <<'EOF'\n--num-layers 4\n--bf16\nEOF\n{RUN} $O",
    "a heredoc for a shell": f"N=4\nsbatch <<EOF\n#!/bin/bash\n{RUN} --num-layers $N --bf16\nEOF\n",
    "a text for a shell": f'CMD="{RUN} --num-layers 4 --bf16"\nsrun -l bash -c "$CMD"',
    "eval": f'CMD="{RUN} --num-layers 4"\nCMD="$CMD --bf16"\neval $CMD',
    "a command in an array": f"CMD=({RUN})\nCMD+=(--num-layers 4 --bf16)\n${{CMD[@]}}",
    "a variable named by another": f"P_7B=4\nK=P_7B\n{RUN} --num-layers ${{!K}} --bf16",
    "keys of an array": f"declare -A L=([a]=2 [b]=4)\nS=b\n{RUN} --num-layers ${{L[$S]}} --bf16",
    "an element of an array": f"L=(2 4)\n{RUN} --num-layers ${{L[1]}} --bf16",
    "cut texts": f"T=x=4\n{RUN} --num-layers ${{T#*=}} --${{U:-bf16}}",
    "export and set": f"export N=4\nset -- --bf16\n{RUN} --num-layers $N $@",
    "environment before it": f"CUDA_DEVICE=1 {RUN} --num-layers 4 --bf16 2>&1 | tee x.log",
    "background": f"{RUN} --num-layers 4 --bf16 > log 2>&1 &\nwait",
    "and": f'N=2\n[[ -n "a" ]] && N=4\nmkdir -p x && {RUN} --num-layers $N --bf16 || exit 1',
    "a default set by a test": f'if [ -z "$N" ]; then\n N=4\nfi\n{RUN} --num-layers $N --bf16',
    "a subshell": f"( cd /tmp && {RUN} --num-layers 4 --bf16 )",
    "an array built of itself": f'A=(--num-layers 4)\nA=( "${{A[@]}}" --bf16 )\n{RUN} "${{A[@]}}"',
    "options of the script": 'N=4\nwhile getopts "n:" o; do case $o in n) N=$OPTARG;; esac; done\n'
    f"{RUN} --num-layers $N --bf16",
    "an array in a text for a shell": f'A=(--num-layers 4)\nbash -c "{RUN} ${{A[*]}} --bf16"',
    "printf": f"{RUN} $(printf -- '--%s %d\\n' num-layers 4) $(printf '%s ' --bf16)",
    "printf into a variable": f"printf -v X '%s-%s' --num layers\n{RUN} $X 4 --bf16",
    "lines joined by tr": "X=$(cat <<EOF | tr '\\n' ' '\n--num-layers 4\n--bf16\nEOF\n)\n"
    f'eval "{RUN} $X"',
    "a part of an array": f'A=(x --num-layers 4 y)\n{RUN} "${{A[@]:1:2}}" --bf16',
    "the last arguments of a function": f'go() {{ {RUN} --num-layers $1 "${{@:2}}"; }}\n'
    "go 4 --bf16",
    "values between commas": f'IFS=, read -ra L <<< "2,4"\n{RUN} --num-layers ${{L[1]}} --bf16',
    "several variables read": f'read -r A B <<< "4 bf16"\n{RUN} --num-layers $A --$B',
    "joined by a separator": 'L=(num layers)\nX=$(IFS=-; echo "${L[*]}")\n'
    + f"{RUN} --$X 4 --bf16",
    "a prefix for each": f'A=(num-layers)\n{RUN} "${{A[@]/#/--}}" 4 --bf16',
    "elements of an array": f'A[0]=--num-layers\nA[1]=4\nA[${{#A[@]}}]=--bf16\n{RUN} "${{A[@]}}"',
    "let": f"N=3\nlet N=N+1\nlet N++ N--\n{RUN} --num-layers $N --bf16",
    "unset": f"X=--fp16\nunset X\n{RUN} --num-layers 4 $X --bf16",
    "comments between flags": f"{RUN} \\\n --num-layers 4 `# layers` \\\n --bf16",
    "exec": f"exec {RUN} --num-layers '4' --bf16",
    "windows' ends of lines": f"{RUN} \\\r\n --num-layers 4 --bf16\r\n",
}


@pytest.mark.parametrize("text", VARIANTS.values(), ids=VARIANTS.keys())
def test_the_flags_are_those_that_bash_passes(text: str, tmp_path: Path) -> None:
    found = read_text(text)
    assert [x.words for x in found.launches] == [("--num-layers", "4", "--bf16")]
    assert found.launches[0].program == "pretrain_gpt.py"
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, does in {
        "torchrun": 'printf "%s\\n" "$@"',
        "srun": 'shift; "$@"',
        "sbatch": "bash",
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{does}\n")
        (tools / name).chmod(0o755)
    shown = subprocess.run(
        [
            "bash",
            "-c",
            text.replace("\r\n", "\n").replace("> log 2>&1", "").replace("| tee x.log", ""),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"PATH": f"{tools}:/usr/bin:/bin"},
    ).stdout.split()
    assert shown == ["--nproc_per_node", "8", "pretrain_gpt.py", "--num-layers", "4", "--bf16"]


def test_an_open_condition_gives_a_launch_for_each_way() -> None:
    text = f'if [ "$MODE" = big ]; then N=8; else N=4; fi\n{RUN} --num-layers $N'
    found = read_text(text)
    assert {x.words[1]: x.assumed for x in found.launches} == {
        "8": (('[ "$MODE" = big ]', True),),
        "4": (('[ "$MODE" = big ]', False),),
    }
    assert [x.words[1] for x in read_text(text, {"MODE": "big"}).launches] == ["8"]


def test_an_open_condition_without_effect_gives_one_launch() -> None:
    found = read_text(f"if [ ! -d out ]; then mkdir out; fi\n[ -f x ] || exit 1\n{RUN} --bf16")
    assert [x.words for x in found.launches] == [("--bf16",)]


def test_a_loop_gives_a_launch_for_each_round() -> None:
    found = read_text(f"for N in 2 4; do\n {RUN} --num-layers $N\ndone")
    assert [x.words[1] for x in found.launches] == ["2", "4"]


def test_open_variables_keep_their_names_until_they_are_given() -> None:
    text = f'D=$1\n{RUN} --data-path $D --save "${{OUT}}/ckpt" --num-layers $((2 * LAYERS))'
    words = [readable(x) for x in read_text(text).launches[0].words]
    assert words == ["--data-path", "$1", "--save", "$OUT/ckpt", "--num-layers", "$((2 * LAYERS))"]
    given = read_text(text, {"1": "/data", "OUT": "/o", "LAYERS": "3"}).launches[0]
    assert given.words == ("--data-path", "/data", "--save", "/o/ckpt", "--num-layers", "6")


def test_flags_behind_a_comment_within_continued_lines_are_told() -> None:
    found = read_text(f"{RUN} \\\n --num-layers 4 \\\n # --fp16 \\\n --bf16\n")
    assert found.launches[0].words == ("--num-layers", "4")
    assert "Line 4 begins with `--bf16`, which is not passed to the program" in found.notes[0]


def test_a_sourced_file_is_read_where_it_lies_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "common.sh").write_text("N=4\n")
    script = tmp_path / "run.sh"
    script.write_text(f'source "$(dirname "$0")/common.sh"\n. ./gone.sh\n{RUN} --num-layers $N\n')
    found = read_script(script)
    assert found.launches[0].words == ("--num-layers", "4")
    assert found.notes == ["The sourced file ./gone.sh is not read."]


def test_a_sourced_file_is_looked_for_where_the_script_has_gone(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "jobs").mkdir()
    (tmp_path / "lib" / "common.sh").write_text("N=4\n")
    script = tmp_path / "jobs" / "run.sh"
    script.write_text(f'cd "$(dirname "$0")/.." || exit 1\n. lib/common.sh\n{RUN} --save $N\n')
    found = read_script(script)
    assert (found.launches[0].words, found.notes) == (("--save", "4"), [])


def test_a_file_of_flags_alone_is_audited_with_a_note(tmp_path: Path) -> None:
    script = tmp_path / "model.sh"
    script.write_text('OPTIONS="--num-layers 4 --bf16"\n')
    found = read_script(script)
    assert found.launches[0].words == ("--num-layers", "4", "--bf16")
    assert "the flags that it leaves in OPTIONS are audited" in found.notes[0]


def test_a_recipe_of_the_functional_tests_is_read(tmp_path: Path) -> None:
    recipe = tmp_path / "model_config.yaml"
    recipe.write_text(
        "ENV_VARS:\n  A: 1\nMODEL_ARGS:\n  --num-layers: 4\n  --bf16: true\n  --fp16: false\n"
        "  --save: ${OUT}\n"
    )
    words = read_script(recipe).launches[0].words
    assert [readable(x) for x in words] == ["--num-layers", "4", "--bf16", "--save", "$OUT"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('X="a\n', 'Line 1 of the script cannot be read: the quote " is not closed.'),
        ("echo\nif true; then echo\n", "Line 2 of the script cannot be read: `if` has no `fi`."),
        ("A=(1 2\n", "Line 1 of the script cannot be read: the array A is not closed."),
        ("echo hello\n", "starts no training program, such as `torchrun … pretrain_gpt.py …`"),
    ],
)
def test_scripts_that_cannot_be_read_are_told(text: str, message: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(text)
    with pytest.raises(DataError, match=".*") as error:
        read_script(script)
    assert message in str(error.value)
