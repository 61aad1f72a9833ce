"""The scripts that run in the scenarios of tests/preload/test_image_preload.py: shell, small programs."""

from __future__ import annotations

# $1 scratch, $2 containerd's configuration, $3 Docker's, $4 the engines' tree, $5 Python, $6 the pause image, $7 the
# other one, $8 the folder with the archive that an engine made of both. The engines' disk is /mnt, in memory. The
# program's output goes to $scratch/<name>, with its status and exit status next to it. The program finds engines by a
# fixed PATH, whose first directory is filled here.
COMMON = """
set -e
scratch=$1 containerd_config=$2 docker_config=$3 tree=$4 python=$5 pause=$6 two=$7 archives=$8
mount -t overlay -o "lowerdir=/etc,upperdir=$scratch/etc,workdir=$scratch/work" overlay /etc
mount -t tmpfs tmpfs /opt
mount -t tmpfs tmpfs /usr/local/sbin
for name in "$tree"/usr/sbin/* "$tree"/usr/bin/*; do ln -sf "$name" /usr/local/sbin; done
mkdir -p /etc/node-agent /opt/preload
wait_for() { i=0; until "$@" >/dev/null 2>&1; do i=$((i + 1)); test $i -lt 1200; sleep 0.1; done; }
settings() {
  cat >/etc/node-agent/preload.json <<END
{"engine": "$engine", "namespace": "k8s.io", "pause": "$1", "mount_point": "/mnt/local",
 "data_root": "${2:-/mnt/local/$engine}"}
END
}
start_docker() {
  dockerd --config-file "$docker_config" --containerd /run/containerd/containerd.sock \\
    --pidfile /run/docker.pid --bridge=none --iptables=false --ip6tables=false >>"$scratch/docker.log" 2>&1 &
  dockerd=$!
  wait_for docker info
}
# What wait returns is the signal's number.
stop_docker() { kill $dockerd; wait $dockerd || true; }
start() {
  mount -t tmpfs tmpfs /run
  mount -t tmpfs -o size=512m tmpfs /mnt
  containerd --config "$containerd_config" >"$scratch/containerd.log" 2>&1 &
  containerd=$!
  wait_for ctr version
  if test $engine = docker; then start_docker; fi
}
# Start an engine that has no image yet, where there is an archive.
start_blank() {
  cp "$archives/$engine.tar" /opt/images.tar
  "$python" "$scratch/list.py" $engine "$@"
  start
}
preload() {
  status=0
  (cd "$scratch/agent" && "$python" -m image_builder.node preload) >"$scratch/$1" 2>&1 || status=$?
  echo $status >"$scratch/$1.rc"
  cp /run/node/status.json "$scratch/$1.status"
}
attempt() { name=$1; shift; status=0; "$@" >"$scratch/$name" 2>&1 || status=$?; echo $status >"$scratch/$name.rc"; }
"""

DOCKER_ARCHIVE = """
engine=docker
start
docker image load --input "$scratch/pause.tar" >/dev/null
docker image load --input "$scratch/two.docker.tar" >/dev/null
docker image save --output "$scratch/docker.tar" "$pause" "$two"
stop_docker
"""

DOCKER = """
engine=docker
start_blank
settings ""
preload first
preload second
docker image rm "$two" >/dev/null
docker image tag "$pause" "$two"
preload moved
docker image inspect "$pause" "$two" >"$scratch/inspect.json"
folder=$(docker image inspect --format '{{.GraphDriver.Data.UpperDir}}' "$two")
mv "$folder" "$folder.gone"
ln -s /nowhere "$folder"
preload dangling
rm "$folder"
preload lost
mv "$folder.gone" /mnt/elsewhere
ln -s /mnt/elsewhere "$folder"
preload linked
rm "$folder"
mv /mnt/elsewhere "$folder"
docker image rm "$two" >/dev/null
settings "" /
"$python" "$scratch/list.py" docker huge
preload full
"$python" "$scratch/list.py" docker
settings ""
docker image ls --format '{{.Repository}}:{{.Tag}}' >"$scratch/after-full"
printf x | dd of=/opt/images.tar conv=notrunc status=none
preload damaged
docker image ls --format '{{.Repository}}:{{.Tag}}' >"$scratch/after-damage"
stop_docker
preload dead
"""

# The seed is simulated: its result is that of a load and, for digests, of an entry in Docker's repositories.json.
SEEDED = """
engine=docker
start_blank
settings "$pause"
"$python" "$scratch/store.py"
preload unseeded
"$python" "$scratch/store.py" degraded
docker image rm "$two" >/dev/null
preload fallback
"$python" "$scratch/store.py" ok
preload digestless
stop_docker
"$python" "$scratch/digests.py"
start_docker
preload seeded
"""

GUARDS = """
engine=docker
start_blank pinned
settings "$pause"
preload first
docker container ls --all --no-trunc --format '{{json .}}' >"$scratch/guards"
docker volume ls --quiet >"$scratch/volumes"
# grep's status 1 says that there is none, which is an answer.
grep -c /mnt/ /proc/self/mountinfo >"$scratch/mounts" || true
grep merged /proc/self/mountinfo >"$scratch/merged" || true
preload second
id=$(docker image inspect --format '{{.Id}}' "$two")
attempt rm-tag docker image rm "$two"
attempt rm-id docker image rm "$id"
attempt prune docker image prune --all --force
attempt inspect docker image inspect "$two"
docker image tag "$two" registry.lab.internal/two/layers:other
attempt rm-second-tag docker image rm "$two"
attempt rm-last-tag docker image rm registry.lab.internal/two/layers:other
docker image ls --no-trunc --format '{{.Repository}}:{{.Tag}} {{.ID}}' >"$scratch/left"
preload retagged
docker image rm registry.lab.internal/two/layers:other >/dev/null
docker image tag "$two" registry.invalid/elsewhere:1
attempt rm-other-repository docker image rm "$two"
docker image tag registry.invalid/elsewhere:1 "$two"
docker image rm registry.invalid/elsewhere:1 >/dev/null
stop_docker
start_docker
preload restarted
docker container prune --force >/dev/null
preload unguarded
docker system prune --force >"$scratch/system-prune"
docker container ls --all --quiet >"$scratch/after-system-prune"
preload pruned
attempt system-prune-all docker system prune --all --force
attempt inspect-pruned docker image inspect "$two"
preload lost
"$python" "$scratch/list.py" docker
preload unpinned
docker container ls --all --quiet >"$scratch/after-unpinned"
attempt forced docker image rm --force "$two"
"""

CONTAINERD_ARCHIVE = """
engine=containerd
start
alias ctr='ctr --namespace k8s.io'
ctr images import "$scratch/pause.tar" >/dev/null
ctr images import "$scratch/two.oci.tar" >/dev/null
ctr images export --platform linux/amd64 "$scratch/containerd.tar" "$pause" "$two"
ctr images list | awk -v ref="$pause" '$1 == ref {print $3}' >"$scratch/pause_digest"
"""

CONTAINERD = """
engine=containerd
pause_digest=$(cat "$archives/pause_digest")
start_blank "$pause_digest"
alias ctr='ctr --namespace k8s.io'
# The CRI plugin names an image by its id and labels it a moment after it was loaded. One line is the heading.
is_managed() {
  ctr images list >"$scratch/list"
  test $(grep -c '^sha256:' "$scratch/list") = 2 && test $(grep -vc image=managed "$scratch/list") = 1
}
settings "$pause"
preload first
wait_for is_managed
ctr images check >"$scratch/check"
preload second
ctr content rm $(cat "$scratch/layer") >/dev/null
preload incomplete
ctr images rm --sync "$two" >/dev/null
ctr images tag "$pause" "$two" >/dev/null
preload moved
for name in $(ctr images list --quiet); do ctr images label "$name" io.cri-containerd.pinned= >/dev/null; done
preload unpinned
ctr images list >"$scratch/list-unpinned"
settings "$pause" /nowhere
preload elsewhere
settings "$pause"
ctr images rm --sync "$two" >/dev/null
settings "$pause" /
"$python" "$scratch/list.py" containerd "$pause_digest" huge
preload full
ctr images list --quiet >"$scratch/after-full"
"$python" "$scratch/list.py" containerd "$pause_digest"
settings "$pause"
printf x | dd of=/opt/images.tar conv=notrunc status=none
preload damaged
ctr images list --quiet >"$scratch/after-damage"
# The status is the signal's number.
kill $containerd; wait $containerd || true
preload dead
"""

# Runs in the scenario, since the archive exists only there. Arguments: the engine; for containerd the pause image's
# digest, which that engine makes up when it imports an archive in Docker's format; `huge` for images that fit on no
# disk, `pinned` to pin all of them.
LIST = """
import hashlib, json, pathlib, sys
here = pathlib.Path(__file__).parent
archive = pathlib.Path("/opt/images.tar").read_bytes()
images = json.loads((here / "images.json").read_text())
for word in sys.argv[2:]:
    for image in images:
        image.update({"huge": {"bytes": 10**16}, "pinned": {"pin": True}}.get(word, {}))
    if word.startswith("sha256:"):
        images[0]["digest"] = images[0]["manifest"] = word
size = 10**16 if "huge" in sys.argv else len(archive)
recorded = {"path": "/opt/images.tar", "bytes": size, "sha256": hashlib.sha256(archive).hexdigest()}
pathlib.Path("/opt/preloaded_docker_images.json").write_text(
    json.dumps({"format": 1, "engine": sys.argv[1], "archive": recorded, "images": images}))
"""

# Describes a preload store that has both images; the argument is the state of the seed's section.
STORE = """
import json, pathlib, sys
images = json.loads((pathlib.Path(__file__).parent / "images.json").read_text())
described = [{**image, "mode": "reference", "required": True} for image in images]
layers = [{"diff_id": d, "bytes": 1, "entries": 1} for image in images for d in image["diff_ids"]]
pathlib.Path("/opt/preload/store.json").write_text(
    json.dumps({"format": 1, "id": "0", "images": described, "layers": layers}))
if len(sys.argv) > 1:
    place = pathlib.Path("/run/node/status.json")
    section = {"state": sys.argv[1]}
    if sys.argv[1] != "ok":
        section |= {"code": "store.verity", "reason": "block 7 is not what was baked"}
    place.write_text(json.dumps({**json.loads(place.read_text()), "seed": section}))
"""

# Adds what a pull by digest leaves in addition to the tags, and `docker image load` doesn't.
DIGESTS = """
import json, pathlib
images = json.loads((pathlib.Path(__file__).parent / "images.json").read_text())
place = pathlib.Path("/mnt/local/docker/image/overlay2/repositories.json")
known = json.loads(place.read_text())
for image in images:
    repository = image["ref"].rpartition(":")[0]
    known["Repositories"][repository][f"{repository}@{image['digest']}"] = image["id"]
place.write_text(json.dumps(known))
"""
