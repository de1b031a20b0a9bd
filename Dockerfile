# The operator's and the worker's image: `--target operator` or `--target worker`.
#
#   BASE_IMAGE     any image of Debian or Ubuntu with Python 3.11 or newer as `python3`, with its `venv` module. A tag may
#                  mean another image tomorrow: name it by its digest (NAME@sha256:...) for an image that you publish
#   INSTALL_DEPS   true: the image holds its dependencies, each file with the hash that requirements/ has of it
#                  false: it holds the project alone, and expects the packages mounted at /opt/env
#   PIP_INDEX_URL, PIP_CERT   another package index, and the certificates to trust it by (docs/operators/images.md)

ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS base
ARG BASE_IMAGE
LABEL org.opencontainers.image.base.name=${BASE_IMAGE}
# A name for the number that the image runs as: PyTorch asks for one.
RUN echo 'mlora:x:65532:65532:mlora:/tmp:/usr/sbin/nologin' >> /etc/passwd
ENV HOME=/tmp \
    PATH=/opt/mlora/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONPATH=/opt/project:/opt/env \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1

# The dependencies depend on these files alone, so a change of code leaves their layer as it is. The project
# is installed too, without its code: for its metadata, and for the command `mlora`. It is built with what is
# installed by then, so that nothing without a hash is ever fetched.
FROM base AS packages
WORKDIR /build
COPY pyproject.toml ./
RUN mkdir -p operator worker /opt/mlora && touch README.md LICENSE

FROM packages AS operator-packages
ARG INSTALL_DEPS=true
ARG PIP_INDEX_URL
ARG PIP_CERT
COPY requirements/operator.txt ./
RUN [ "$INSTALL_DEPS" = false ] || \
    { python3 -m venv /opt/mlora && \
      pip install --no-cache-dir --only-binary :all: --require-hashes --requirement operator.txt && \
      pip install --no-cache-dir --no-index --no-deps --no-build-isolation .; }

FROM packages AS worker-packages
ARG INSTALL_DEPS=true
ARG PIP_INDEX_URL
ARG PIP_CERT
COPY requirements/worker.txt ./
RUN [ "$INSTALL_DEPS" = false ] || \
    { python3 -m venv /opt/mlora && \
      pip install --no-cache-dir --only-binary :all: --require-hashes --requirement worker.txt && \
      pip install --no-cache-dir --no-index --no-deps --no-build-isolation . && \
      rm /opt/mlora/bin/mlora; }

FROM base AS operator
COPY --from=operator-packages /opt/mlora /opt/mlora
COPY operator/ worker/ /opt/project/
USER 65532:65532
ENTRYPOINT ["python3", "-m", "mlora_operator"]

# Triton, which compiles the worker's GPU kernels, calls a C compiler and needs Python's headers.
FROM base AS compiler
ARG INSTALL_DEPS=true
RUN [ "$INSTALL_DEPS" = false ] || { \
      apt-get update && \
      apt-get install -y --no-install-recommends gcc libc6-dev \
        $(python3 -c 'import os, sysconfig; p = sysconfig.get_paths()["include"]; print("" if os.path.exists(p + "/Python.h") else "python3-dev")') && \
      rm -rf /var/lib/apt/lists/*; }

FROM compiler AS worker
COPY --from=worker-packages /opt/mlora /opt/mlora
COPY worker/ /opt/project/
USER 65532:65532
ENTRYPOINT ["python3", "-m", "mlora_worker"]
