# syntax=docker/dockerfile:1
# An image with the package and its commands on CUDA; it runs as a user without rights.
#
#   docker build -t megatron-ext .
#   docker run --rm --gpus all --shm-size 16g megatron-ext                      # the doctor's report
#   docker run --rm --gpus all --shm-size 16g -v "$PWD/out:/training" megatron-ext \
#       megatron-ext-pretrain-gpt --nproc-per-node 8 ...
#
# torch's wheels bring the CUDA libraries that they need. The compiler is for the kernels that triton
# and torch.compile build when they run.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04 AS python
# Ubuntu keeps only the newest version of a package, so that a pinned one could not be installed later.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

FROM python AS wheel
WORKDIR /source
COPY . .
RUN python3 -m venv /build && /build/bin/pip wheel --no-cache-dir --no-deps -w /wheels .

FROM python
ARG EXTRAS=hf,s3,video
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    python3 -m venv /opt/megatron_ext \
    && /opt/megatron_ext/bin/pip install --no-cache-dir \
        "$(echo /wheels/*.whl)[$EXTRAS]" -c /constraints.txt \
    && useradd --uid 10001 --create-home trainer \
    && install -d -o trainer -g trainer /training
ENV PATH=/opt/megatron_ext/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
WORKDIR /training
CMD ["megatron-ext-doctor"]
