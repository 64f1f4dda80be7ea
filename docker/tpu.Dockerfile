# Image for TPU hosts (Cloud TPU VMs, GKE). libtpu comes with the wheels of the lock file.
#
#   docker build --file docker/tpu.Dockerfile --tag jaxrl:tpu .
#   docker run --rm --privileged --net=host --volume "$PWD/runs:/runs" jaxrl:tpu \
#     python -m jaxrl.train --config=configs/grpo_1p5b.py --config.run_dir=/runs/a
#
# On GKE the device plugin gives the chips to the container; --privileged is for a VM. On several hosts of one slice see
# docker/kubernetes/tpu_jobset.yaml.
#
# Tried: linted with hadolint; its commands are parsed by tests/test_cluster_files.py. Not tried: a build of the image,
# a run on a TPU.
FROM python:3.12-slim-bookworm AS build
COPY --from=ghcr.io/astral-sh/uv:0.13.9 /uv /usr/local/bin/uv
ENV UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never
WORKDIR /app
COPY pyproject.toml uv.lock README.md LICENSE ./
RUN uv sync --locked --no-dev --no-install-project --extra tpu --extra wandb
COPY jaxrl jaxrl
COPY sharding sharding
COPY configs configs
COPY scripts scripts
RUN uv sync --locked --no-dev --extra tpu --extra wandb

FROM python:3.12-slim-bookworm
RUN useradd --create-home --uid 1000 jaxrl && mkdir /runs && chown jaxrl /runs
COPY --from=build --chown=jaxrl /app /app
ENV PATH=/app/.venv/bin:$PATH JAX_PLATFORMS=tpu,cpu
WORKDIR /app
USER 1000
VOLUME /runs
CMD ["python", "-m", "jaxrl.train", "--config=configs/grpo_1p5b.py", "--config.run_dir=/runs/grpo"]
