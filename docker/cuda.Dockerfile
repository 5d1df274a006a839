# The project on NVIDIA GPUs: learners and their workers. From the repository's root:
#   docker build -f docker/cuda.Dockerfile -t diloco:cuda .
FROM rayproject/ray:2.60.0-py311-cu130

# By number, so that Kubernetes can see that it isn't root; the group is `users`, as in the base image.
USER 1000
# Packages first: they change less often than the code. Torch brings CUDA 13 of its own; nodes need a driver for that.
COPY --chown=1000:100 docker/requirements.txt /home/ray/requirements.txt
RUN pip install --no-cache-dir -r /home/ray/requirements.txt \
    && mkdir -p /home/ray/diloco /home/ray/runs
COPY --chown=1000:100 app /home/ray/diloco/app
COPY --chown=1000:100 actors /home/ray/diloco/actors
COPY --chown=1000:100 conf /home/ray/diloco/conf

# Actors find the code wherever their process starts; no statistics are sent.
ENV PYTHONPATH=/home/ray/diloco \
    RAY_USAGE_STATS_ENABLED=0 \
    RAY_ENABLE_UV_RUN_RUNTIME_ENV=0
WORKDIR /home/ray/diloco
# Whether the node's raylet lives. Kubernetes does not look at this: KubeRay asks the same by probes of its own.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=6 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:52365/api/local_raylet_healthz', timeout=4)"]
CMD ["ray", "start", "--head", "--block"]
