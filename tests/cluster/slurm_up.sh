#!/usr/bin/env bash
# A SLURM of two nodes on one Debian machine, for tests: slurmctld, two slurmd, munge; every node claims GPUs that are
# device files without a device. No systemd, no control groups (memory is enforced by looking), no accounting. Run it
# again to repair what has died.
#
#   slurm_up.sh         install what is missing, start, wait until both nodes are idle
#   slurm_up.sh stop    end what this script started
#
# As root, or as a user who may become root without a password. Exit code 77: this machine can have no SLURM, and why;
# another one: it can, and something is wrong.
#
# All its files lie in MFUBENCH_SLURM (default /var/lib/mfubench-slurm), but for the link /etc/slurm/slurm.conf: within
# jobs the executor plugin drops SLURM_CONF.
set -euo pipefail

folder=${MFUBENCH_SLURM:-/var/lib/mfubench-slurm}
nodes=(n1 n2)
gpus=2           # a node
cpus=4           # a node, whether the machine has them or not
memory_mb=$(awk '/MemTotal/ {print int($2 / 1024)}' /proc/meminfo)
host=$(hostname -s)
first_port=16817 # slurmctld; the slurmds take the next ones: beside another SLURM's 6817 and 6818
export SLURM_CONF=$folder/slurm.conf PATH=$PATH:/usr/sbin

die() { echo "slurm_up.sh: $*" >&2; exit 1; }
unavailable() { echo "no SLURM can be had here: $*" >&2; exit 77; }

# alive NAME PIDFILE: that process exists, by that name, and is no zombie
alive() {
  local pid comm="" state=""
  pid=$(cat "$2" 2>/dev/null) || return 1 # a daemon that ends removes the file itself
  [ -n "$pid" ] && read -r comm state < <(ps -o comm= -o state= -p "$pid") && [ "$comm $state" != "$1 Z" ] &&
    [ "$comm" = "$1" ]
}

end() { # NAME PIDFILE
  if alive "$1" "$2"; then
    kill "$(cat "$2")"
    for _ in $(seq 100); do alive "$1" "$2" || break; sleep 0.1; done
  fi
  rm -f "$2"
}

stop() {
  alive slurmctld "$folder/slurmctld.pid" && { squeue -h -o %i | xargs -r timeout 20 scancel; sleep 1; }
  for node in "${nodes[@]}"; do end slurmd "$folder/slurmd.$node.pid"; done
  end slurmctld "$folder/slurmctld.pid"
  end munged "$folder/munged.pid"
  [ "$(readlink /etc/slurm/slurm.conf)" = "$SLURM_CONF" ] && rm /etc/slurm/slurm.conf
}

install_packages() {
  local missing=() pair
  for pair in munged:munge slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client ps:procps; do
    command -v "${pair%:*}" >/dev/null || missing+=("${pair#*:}")
  done
  [ ${#missing[@]} = 0 ] && return
  command -v apt-get >/dev/null || unavailable "${missing[*]} missing, and there is no apt-get"
  echo "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive LC_ALL=C
  local install=(apt-get install -qq -y -o Dpkg::Use-Pty=0 --no-install-recommends "${missing[@]}") said
  "${install[@]}" >/dev/null 2>&1 && return
  apt-get update -qq >/dev/null 2>&1 || true # package lists were missing or old
  said=$("${install[@]}" 2>&1 >/dev/null) || unavailable "apt-get could not install ${missing[*]}: ${said//$'\n'/ }"
}

write_configuration() {
  mkdir -p "$folder"/{state,log,cgroup,devices} /etc/slurm
  [ -e /etc/slurm/slurm.conf ] || ln -sf "$SLURM_CONF" /etc/slurm/slurm.conf
  [ "$(readlink /etc/slurm/slurm.conf)" = "$SLURM_CONF" ] || unavailable "/etc/slurm/slurm.conf is another SLURM's"
  local node port=$first_port lines="" index
  for ((index = 0; index < gpus; index++)); do
    # one distinct device a GPU (the null device), so that SLURM hands out indices; a file where mknod is forbidden
    [ -e "$folder/devices/gpu$index" ] || mknod -m 666 "$folder/devices/gpu$index" c 1 3 2>/dev/null ||
      : >"$folder/devices/gpu$index"
  done
  for node in "${nodes[@]}"; do
    port=$((port + 1))
    lines+="NodeName=$node NodeHostname=$host NodeAddr=127.0.0.1 Port=$port"
    lines+=" CPUs=$cpus RealMemory=$memory_mb Gres=gpu:$gpus State=UNKNOWN"$'\n'
  done
  cat >"$SLURM_CONF" <<CONF
ClusterName=mfubench
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$first_port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool.%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
GresTypes=gpu
DefMemPerCPU=500
ReturnToService=2
KillWait=10
MinJobAge=3600
JobRequeue=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=3
JobAcctGatherParams=OverMemoryKill
$lines
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=NO
PartitionName=cpu Nodes=ALL MaxTime=INFINITE OverSubscribe=NO
CONF
  printf 'AutoDetect=off\nName=gpu File=%s/devices/gpu[0-%d]\n' "$folder" $((gpus - 1)) >"$folder/gres.conf"
  # slurmd loads a control group plugin at its start even where nothing uses it, and dies where /sys/fs/cgroup is not
  # as expected. Releases from 23 on can do without; the v1 plugin of older ones touches nothing in a folder of its own.
  if [ "$(slurmctld -V | sed -E 's/[^0-9]*([0-9]+).*/\1/')" -ge 23 ]; then
    echo "CgroupPlugin=disabled" >"$folder/cgroup.conf"
  else
    printf 'CgroupPlugin=cgroup/v1\nCgroupMountpoint=%s/cgroup\n' "$folder" >"$folder/cgroup.conf"
  fi
}

start_munge() {
  alive munged "$folder/munged.pid" && return
  if [ ! -s "$folder/munge.key" ]; then
    (umask 077 && head -c 1024 /dev/urandom >"$folder/munge.key")
  fi
  munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
    --log-file="$folder/log/munged.log" --seed-file="$folder/munge.seed" --num-threads=2
}

start_daemons() {
  alive slurmctld "$folder/slurmctld.pid" || slurmctld -i >>"$folder/log/start.log" 2>&1 ||
    die "slurmctld did not start: $(tail -n 3 "$folder/log/slurmctld.log")"
  for node in "${nodes[@]}"; do
    mkdir -p "$folder/spool.$node"
    alive slurmd "$folder/slurmd.$node.pid" || slurmd -N "$node" >>"$folder/log/start.log" 2>&1 ||
      die "slurmd of $node did not start: $(tail -n 3 "$folder/log/slurmd.$node.log")"
  done
}

wait_until_idle() {
  local states
  for attempt in $(seq 200); do
    states=$(timeout 5 sinfo -h -N -p gpu -o %T 2>/dev/null | sort -u | tr '\n' ' ')
    [ "$states" = "idle " ] && return
    if [ $((attempt % 10)) = 0 ]; then
      for node in "${nodes[@]}"; do scontrol update "nodename=$node" state=resume 2>/dev/null || true; done
    fi
    sleep 0.3
  done
  die "the nodes did not become idle (${states:-no answer}); see $folder/log"
}

if [ "$(id -u)" != 0 ]; then
  sudo -n true 2>/dev/null || unavailable "neither root nor sudo without a password"
  exec sudo -n env "MFUBENCH_SLURM=$folder" "$0" "$@"
fi
if [ "${1:-}" = stop ]; then
  stop || true
  exit
fi
install_packages
write_configuration
start_munge
start_daemons
wait_until_idle
