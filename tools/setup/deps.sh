#!/bin/sh
# Installs what building and testing Torpor needs beyond Go on Debian 12 or 13, and nothing that is already there.
# When nothing is missing it only looks, so it is cheap enough to run before every build.
#
# Environment: TORPOR_CACHE (default ~/.cache/torpor) is where a newer Node.js goes if the distribution's is too old.
set -eu

cache=${TORPOR_CACHE:-${HOME:-/root}/.cache/torpor}
node_dir=$cache/tools/node-20
qemu_min=10 # 7.2, Debian 12's own, freezes under nested virtualisation
node_min=20.18 # what the e2b npm package asks for

say() { echo "deps: $*" >&2; }
die() { say "$*"; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }
installed() { dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null | grep -qx installed; }
at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; } # at_least HAVE WANTED

as_root() {
	if [ "$(id -u)" = 0 ]; then "$@"
	elif have sudo; then sudo "$@"
	else die "installing packages needs root: run this once as root, or install sudo"; fi
}

apt_get() { as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=600 "$@"; }

updated=
apt_update() { [ -n "$updated" ] || apt_get update >&2; updated=1; }

# apt_candidate PACKAGE prints the upstream version apt would install, without epoch and revision.
apt_candidate() { apt-cache policy "$1" | sed -n 's/^ *Candidate: *\([0-9]*:\)\{0,1\}\([0-9.]*\).*/\2/p'; }

qemu_version() { qemu-system-x86_64 --version 2>/dev/null | sed -n '1s/.*version \([0-9.]*\).*/\1/p'; }
qemu_ok() { have qemu-system-x86_64 && at_least "$(qemu_version)" "$qemu_min"; }

node_version() { node --version 2>/dev/null | tr -d v; }
node_ok() { have node && have npm && at_least "$(node_version)" "$node_min"; }

# The mirror this machine gets its release from, and the key it trusts for it: the backports suite lives beside them.
add_backports() {
	release=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
	[ -n "$release" ] || die "cannot tell which Debian release this is: install qemu-system-x86 $qemu_min or newer by hand"
	line=$(apt-get indextargets --format '$(RELEASE) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' |
		awk -v r="$release" '$2 == "main" { if ($1 == r) { if (!first) first = $3; base[$3] = 1 } if ($1 == r "-updates") upd[$3] = 1 }
			END { for (u in base) if (u in upd) { print u; exit } print first }' | head -n 1)
	[ -n "$line" ] || die "no apt source for $release/main: install qemu-system-x86 $qemu_min or newer by hand"
	key=/usr/share/keyrings/debian-archive-keyring.gpg
	say "adding $release-backports from this machine's own mirror"
	printf 'Types: deb\nURIs: %s\nSuites: %s-backports\nComponents: main\nSigned-By: %s\n' "$line" "$release" "$key" |
		as_root tee /etc/apt/sources.list.d/torpor-backports.sources >/dev/null
	updated=
}

install_qemu() {
	apt_update
	if at_least "$(apt_candidate qemu-system-x86)" "$qemu_min"; then
		apt_get install -y --no-install-recommends qemu-system-x86 >&2
	else
		release=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
		apt-cache policy | grep -q "n=$release-backports" || { add_backports; apt_update; }
		apt_get install -y --no-install-recommends -t "$release-backports" qemu-system-x86 >&2
	fi
	qemu_ok || die "QEMU $qemu_min or newer is needed, but apt gave $(qemu_version)"
}

# A newer Node.js as an npm package that ships the binary, when the distribution's is too old.
install_node() {
	if [ -x "$node_dir/bin/node" ] && have npm; then return; fi
	apt_update
	if ! have npm; then apt_get install -y --no-install-recommends nodejs npm >&2; fi
	if node_ok; then return; fi
	say "Node.js $(node_version) is older than $node_min: putting node@20 into $node_dir"
	mkdir -p "$node_dir"
	npm install --prefix "$node_dir" --no-audit --no-fund --loglevel=error node@20 >&2
	mkdir -p "$node_dir/bin"
	ln -sf ../node_modules/node/bin/node "$node_dir/bin/node"
	at_least "$("$node_dir/bin/node" --version | tr -d v)" "$node_min" || die "node@20 from npm does not run here"
}

have apt-get || die "this is not a Debian system: install qemu >= $qemu_min, acpica-tools, busybox-static, e2fsprogs, mmdebstrap, gcc, make, git and node >= $node_min by hand"

# Two runs at once would fight for apt's locks.
if [ -z "${TORPOR_DEPS_LOCKED:-}" ]; then
	exec env TORPOR_DEPS_LOCKED=1 flock "${TMPDIR:-/tmp}/torpor-deps-$(id -u).lock" "$0" "$@"
fi

missing=
for p in acpica-tools busybox-static ca-certificates cpio e2fsprogs gcc git libc6-dev make mmdebstrap procps xz-utils zstd; do
	installed "$p" || missing="$missing $p"
done
if [ -n "$missing" ]; then
	say "installing$missing"
	apt_update
	apt_get install -y --no-install-recommends $missing >&2
fi
qemu_ok || { say "installing QEMU"; install_qemu; }
node_ok || install_node
