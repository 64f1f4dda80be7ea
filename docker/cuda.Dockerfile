# Image for NVIDIA GPUs. CUDA comes with the wheels of the lock file; the host needs only a driver for CUDA 13
# (580 or newer) and the NVIDIA container toolkit.
#
#   docker build --file docker/cuda.Dockerfile --tag jaxrl:cuda .
#   docker run --rm --gpus all --shm-size=16g --volume "$PWD/runs:/runs" jaxrl:cuda \
#     python -m jaxrl.train --config=configs/grpo_1p5b_h100.py --config.run_dir=/runs/a
#
# Tried: linted with hadolint; its commands are parsed by tests/test_cluster_files.py. Not tried: a build of the image,
# a run on a GPU.
FROM python:3.12-slim-bookworm AS build
COPY --from=ghcr.io/astral-sh/uv:0.13.9 /uv /usr/local/bin/uv
ENV UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never
WORKDIR /app
COPY pyproject.toml uv.lock README.md LICENSE ./
RUN uv sync --locked --no-dev --no-install-project --extra cuda --extra ray --extra wandb
COPY jaxrl jaxrl
COPY sharding sharding
COPY configs configs
COPY scripts scripts
RUN uv sync --locked --no-dev --extra cuda --extra ray --extra wandb

FROM python:3.12-slim-bookworm
RUN useradd --create-home --uid 1000 jaxrl && mkdir /runs && chown jaxrl /runs
COPY --from=build --chown=jaxrl /app /app
ENV PATH=/app/.venv/bin:$PATH JAX_PLATFORMS=cuda \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /app
USER 1000
VOLUME /runs
CMD ["python", "-m", "jaxrl.train", "--config=configs/grpo_1p5b_h100.py", "--config.run_dir=/runs/grpo"]
