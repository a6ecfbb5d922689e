// Package hostvm runs an emulated host: a Linux machine with AMD-V and KVM inside QEMU's software emulation, for
// development and test machines whose own processor has neither.
//
// An Instance is one such machine, known by name; each has a directory under the cache with everything of it:
//
//	<cache>/hostvm/<instance>/lock         flock held while the machine is started or stopped
//	                          qemu.pid     process id and start time of QEMU
//	                          state.json   how it was started: ports, disks, what is in it (0600: holds the token)
//	                          data.img     its persistent disk, sparse; mounted at /var/lib/torpor
//	                          console.log  what its kernel and init said; console.log.1 is the start before
//	                          qemu.log     what QEMU said
//	                          initrd       kernel modules, busybox, init and the project's binaries, made at each start
//	<cache>/hostvm/images-<digest>.ext4    an image set as a read-only disk, shared by all instances
//
// The machine is reached through ports forwarded on 127.0.0.1 and has no other way out or in. Commands run in it over
// the exec channel (package wire). QEMU is started in a session of its own and outlives its launcher; whoever opens the
// instance next finds it by process id and start time. All methods may be called from several goroutines and processes.
package hostvm
