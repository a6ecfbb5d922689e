// Package virtio holds the devices a guest sees: block, net, rng, vsock and balloon. Each implements mmio.Device.
//
// Whatever the guest writes is hostile until checked: lengths are bounded, headers are copied before they are read, a request
// that makes no sense fails alone, and a queue that makes no sense makes its device ask for a reset. Work is done on the
// device's own goroutines, which end with Reset, or on the one that waits for a queue's notifications.
package virtio

// Device types (virtio 1.2, section 5).
const (
	idNet     = 1
	idBlock   = 2
	idRNG     = 4
	idBalloon = 5
	idVsock   = 19
)
