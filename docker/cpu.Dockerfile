# Image for CPU: tests, quickstart, reward services, plans for absent devices.
#
#   docker build --file docker/cpu.Dockerfile --tag jaxrl:cpu .
#   docker run --rm --volume "$PWD/runs:/runs" jaxrl:cpu \
#     python -m jaxrl.train --config=configs/quickstart.py --config.total_steps=2 --config.run_dir=/runs/try
#
# Tried: linted with hadolint; its commands are parsed by tests/test_cluster_files.py. Not tried: a build of the image.
FROM python:3.12-slim-bookworm AS build
COPY --from=ghcr.io/astral-sh/uv:0.13.9 /uv /usr/local/bin/uv
ENV UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never
WORKDIR /app
# The environment changes less often than the code: it is a separate layer.
COPY pyproject.toml uv.lock README.md LICENSE ./
RUN uv sync --locked --no-dev --no-install-project --group quickstart
COPY jaxrl jaxrl
COPY sharding sharding
COPY configs configs
COPY scripts scripts
RUN uv sync --locked --no-dev --group quickstart

FROM python:3.12-slim-bookworm
RUN useradd --create-home --uid 1000 jaxrl && mkdir /runs && chown jaxrl /runs
COPY --from=build --chown=jaxrl /app /app
ENV PATH=/app/.venv/bin:$PATH JAX_PLATFORMS=cpu
WORKDIR /app
USER 1000
VOLUME /runs
CMD ["python", "-m", "jaxrl.train", "--config=configs/quickstart.py", "--config.run_dir=/runs/quickstart"]
