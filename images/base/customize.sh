#!/bin/sh
# mmdebstrap runs this as its customize hook, with the new root file system's directory as the only argument.
# It makes of the bare packages the machine that `user` finds; what it writes must be the same on every run.
set -eu
root=$1

chroot "$root" useradd --uid 1000 --user-group --create-home --shell /bin/bash user
echo 'user ALL=(ALL:ALL) NOPASSWD: ALL' >"$root/etc/sudoers.d/user"
chmod 0440 "$root/etc/sudoers.d/user"

echo sandbox >"$root/etc/hostname"
printf '127.0.0.1\tlocalhost sandbox\n::1\tlocalhost ip6-localhost ip6-loopback\n' >"$root/etc/hosts"
: >"$root/etc/resolv.conf" # a sandbox has no network: nobody to ask
echo 'LANG=C.UTF-8' >"$root/etc/default/locale"

# The build machine's mirror, proxies and log lines are no business of the guest's.
rm -rf "$root"/etc/apt/sources.list.d/* "$root/etc/apt/apt.conf.d/99mmdebstrap"
: >"$root/etc/apt/sources.list"
rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/*.bin "$root"/var/cache/apt/archives/*
rm -rf "$root"/var/log/apt "$root"/var/log/*.log "$root"/var/cache/ldconfig/aux-cache
rm -f "$root"/var/cache/debconf/*-old "$root"/var/lib/dpkg/*-old
rm -f "$root"/etc/passwd- "$root"/etc/group- "$root"/etc/shadow- "$root"/etc/gshadow- "$root"/etc/subuid- "$root"/etc/subgid-
rm -rf "$root"/tmp/* "$root"/run/*

# Identity is given when a sandbox starts, never shared by all of them.
: >"$root/etc/machine-id"
rm -f "$root/var/lib/dbus/machine-id" "$root"/etc/ssh/ssh_host_*
