package mmio

import (
	"encoding/binary"

	"torpor/vmm/guestmem"
)

// Register offsets (virtio 1.2, section 4.2.2).
const (
	regMagic            = 0x000
	regVersion          = 0x004
	regDeviceID         = 0x008
	regVendorID         = 0x00c
	regDeviceFeatures   = 0x010
	regDeviceSelect     = 0x014
	regDriverFeatures   = 0x020
	regDriverSelect     = 0x024
	regQueueSelect      = 0x030
	regQueueNumMax      = 0x034
	regQueueNum         = 0x038
	regQueueReady       = 0x044
	regQueueNotify      = 0x050
	regInterruptStatus  = 0x060
	regInterruptAck     = 0x064
	regStatus           = 0x070
	regQueueDescLow     = 0x080
	regQueueDescHigh    = 0x084
	regQueueAvailLow    = 0x090
	regQueueAvailHigh   = 0x094
	regQueueUsedLow     = 0x0a0
	regQueueUsedHigh    = 0x0a4
	regShmLenLow        = 0x0b0
	regShmLenHigh       = 0x0b4
	regShmBaseLow       = 0x0b8
	regShmBaseHigh      = 0x0bc
	regConfigGeneration = 0x0fc
	regConfig           = 0x100
)

const (
	magic    = 0x74726976 // "virt"
	version  = 2
	vendorID = 0x50524f54 // "TORP"
)

// StatusOffset is where a driver reads, at every interrupt, what it is about; with what it writes at AckOffset it clears that.
const (
	StatusOffset = regInterruptStatus
	AckOffset    = regInterruptAck
)

// NotifyOffset is where a driver writes a queue's index to notify it: the place for an ioeventfd.
const NotifyOffset = regQueueNotify

// Read answers a guest's read of len(p) bytes at off within the window. All of p is set.
func (t *Transport) Read(off uint64, p []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	clear(p)
	switch {
	case off >= Size:
	case off >= regConfig:
		t.dev.ReadConfig(off-regConfig, p)
	case len(p) == 4:
		binary.LittleEndian.PutUint32(p, t.readLocked(off))
	}
}

// Write takes a guest's write of p at off within the window.
func (t *Transport) Write(off uint64, p []byte) {
	if off == regQueueNotify && len(p) == 4 {
		t.Notify(int(binary.LittleEndian.Uint32(p)))
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case off >= Size:
	case off >= regConfig:
		t.dev.WriteConfig(off-regConfig, p)
	case len(p) == 4:
		t.writeLocked(off, binary.LittleEndian.Uint32(p))
	}
}

func (t *Transport) readLocked(off uint64) uint32 {
	switch off {
	case regMagic:
		return magic
	case regVersion:
		return version
	case regDeviceID:
		return t.dev.ID()
	case regVendorID:
		return vendorID
	case regDeviceFeatures:
		return half(t.offered(), t.deviceSelect)
	case regQueueNumMax:
		if s := t.setupLocked(); s != nil {
			return uint32(s.max)
		}
	case regQueueReady:
		if s := t.setupLocked(); s != nil && s.ready {
			return 1
		}
	case regInterruptStatus:
		return t.interrupt.Load()
	case regStatus:
		if t.needsReset.Load() {
			return t.status | statusNeedsReset
		}
		return t.status
	case regShmLenLow, regShmLenHigh, regShmBaseLow, regShmBaseHigh:
		return 0xffffffff // no shared memory
	case regConfigGeneration:
		return t.generation.Load()
	}
	return 0
}

func (t *Transport) writeLocked(off uint64, v uint32) {
	switch off {
	case regDeviceSelect:
		t.deviceSelect = v
	case regDriverSelect:
		t.driverSelect = v
	case regDriverFeatures:
		if t.status&(statusDriver|statusFeaturesOK) == statusDriver {
			setHalf(&t.driverFeatures, t.driverSelect, v)
		}
	case regQueueSelect:
		t.queueSelect = v
	case regInterruptAck:
		t.interrupt.And(^v)
	case regStatus:
		t.writeStatusLocked(v)
	default:
		t.writeQueueLocked(off, v)
	}
}

// writeStatusLocked follows the driver through section 3.1.1: bits are set in order and only ever added, or all cleared.
func (t *Transport) writeStatusLocked(v uint32) {
	if v == 0 {
		t.resetLocked()
		return
	}
	if t.status&^v != 0 || t.status&statusFailed != 0 {
		return
	}
	added := v &^ t.status
	t.status |= added & statusFailed
	if added&statusAcknowledge != 0 {
		t.status |= statusAcknowledge
	}
	if added&statusDriver != 0 && t.status&statusAcknowledge != 0 {
		t.status |= statusDriver
	}
	if added&statusFeaturesOK != 0 && t.status&statusDriver != 0 && t.acceptableLocked() {
		t.status |= statusFeaturesOK
	}
	if added&statusDriverOK != 0 && t.status&statusFeaturesOK != 0 {
		t.status |= statusDriverOK
		t.activateLocked()
	}
}

func (t *Transport) acceptableLocked() bool {
	return t.driverFeatures&^t.offered() == 0 && t.driverFeatures&FeatureVersion1 != 0
}

// writeQueueLocked sets up the selected queue, between FEATURES_OK and DRIVER_OK.
func (t *Transport) writeQueueLocked(off uint64, v uint32) {
	s := t.setupLocked()
	if s == nil || t.status&(statusFeaturesOK|statusDriverOK) != statusFeaturesOK {
		return
	}
	if off == regQueueReady {
		s.ready = v&1 != 0
		return
	}
	if s.ready {
		return
	}
	switch off {
	case regQueueNum:
		if v > 0 && v <= uint32(s.max) && v&(v-1) == 0 {
			s.Size = uint16(v)
		}
	case regQueueDescLow, regQueueDescHigh:
		setAddr(&s.Desc, off, v)
	case regQueueAvailLow, regQueueAvailHigh:
		setAddr(&s.Avail, off, v)
	case regQueueUsedLow, regQueueUsedHigh:
		setAddr(&s.Used, off, v)
	}
}

// setupLocked returns the selected queue's set-up, nil if there is no such queue.
func (t *Transport) setupLocked() *queueSetup {
	if t.queueSelect >= uint32(len(t.setups)) {
		return nil
	}
	return &t.setups[t.queueSelect]
}

// half returns 32 bits of v: the low ones for 0, the high ones for 1, none otherwise.
func half(v uint64, which uint32) uint32 {
	if which > 1 {
		return 0
	}
	return uint32(v >> (32 * which))
}

// setHalf is the reverse of half.
func setHalf(v *uint64, which, bits uint32) {
	if which > 1 {
		return
	}
	*v = *v&^(0xffffffff<<(32*which)) | uint64(bits)<<(32*which)
}

// setAddr sets the half of an address that the register at off stands for: the high halves are at odd words.
func setAddr(a *guestmem.Addr, off uint64, v uint32) {
	u := uint64(*a)
	setHalf(&u, uint32(off>>2&1), v)
	*a = guestmem.Addr(u)
}
