# ProxyCommand of a slice: sh bastion.sh NAME HOST:PORT. NAME is a bastion of the ssh_config beside this file.
# Hosts are connected to at once, so whoever comes first makes the connection to the bastion, and the others wait for it.
# Where connections are shared, OpenSSH hides what a ProxyCommand says, but shows what is no version of SSH.
cd "$(dirname "$0")" || exit
flock --close "$1.lock" sh -c '
    ssh -F ssh_config -O check "$0" >/dev/null 2>&1 && exit
    ssh -F ssh_config -fN "$0" >/dev/null 2>"$0.log" && exit
    echo "SSH-no way through $0: $(tail -n 1 "$0.log" | tr -d "\r")"
    exit 1
' "$1" </dev/null || exit
exec ssh -F ssh_config -W "$2" "$1"
