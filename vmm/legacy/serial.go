package legacy

import (
	"errors"
	"io"
	"sync"
)

// Registers of a 16550A (National Semiconductor PC16550D data sheet, table II), by offset.
const (
	regData = 0 // RBR/THR; divisor low while DLAB
	regIER  = 1 // divisor high while DLAB
	regIIR  = 2 // FCR on write
	regLCR  = 3
	regMCR  = 4
	regLSR  = 5
	regMSR  = 6
	regSCR  = 7

	ierTHRE  = 1 << 1
	ierMask  = 0x0f
	iirNone  = 0x01
	iirTHRE  = 0x02
	iirFIFO  = 0xc0
	fcrFIFO  = 1 << 0
	lcrDLAB  = 1 << 7
	mcrDTR   = 1 << 0
	mcrRTS   = 1 << 1
	mcrOut1  = 1 << 2
	mcrOut2  = 1 << 3
	mcrLoop  = 1 << 4
	mcrMask  = 0x1f
	lsrIdle  = 0x60 // transmitter and holding register empty: bytes leave at once
	msrCTS   = 1 << 4
	msrDSR   = 1 << 5
	msrRI    = 1 << 6
	msrDCD   = 1 << 7
	msrReady = msrCTS | msrDSR | msrDCD // a terminal is connected
)

// Serial is a 16550A that only transmits.
type Serial struct {
	out io.Writer
	irq func()

	mu                         sync.Mutex
	ier, fcr, lcr, mcr, scr    uint8
	divisorLow, divisorHigh    uint8
	transmitterEmptyUnreported bool // the THRE interrupt is pending
}

// NewSerial returns a port in its reset state. Bytes go to out; its errors are ignored, as a line without a listener would.
// irq raises the interrupt line once; it must not block.
func NewSerial(out io.Writer, irq func()) *Serial { return &Serial{out: out, irq: irq} }

// Read answers a read of a register (0-7).
func (s *Serial) Read(reg uint16) uint8 {
	s.mu.Lock()
	defer s.mu.Unlock()
	dlab := s.lcr&lcrDLAB != 0
	switch reg {
	case regData:
		if dlab {
			return s.divisorLow
		}
		return 0
	case regIER:
		if dlab {
			return s.divisorHigh
		}
		return s.ier
	case regIIR:
		return s.identifyLocked()
	case regLCR:
		return s.lcr
	case regMCR:
		return s.mcr
	case regLSR:
		return lsrIdle
	case regMSR:
		return s.modemStatusLocked()
	case regSCR:
		return s.scr
	}
	return absent
}

// identifyLocked reports the pending interrupt and, as the chip does, takes it back by being read.
func (s *Serial) identifyLocked() uint8 {
	v := uint8(iirNone)
	if s.transmitterEmptyUnreported && s.ier&ierTHRE != 0 {
		v = iirTHRE
		s.transmitterEmptyUnreported = false
	}
	if s.fcr&fcrFIFO != 0 {
		v |= iirFIFO
	}
	return v
}

// modemStatusLocked reports a ready terminal, or in loop-back mode the chip's own outputs, which drivers use to detect it.
func (s *Serial) modemStatusLocked() uint8 {
	if s.mcr&mcrLoop == 0 {
		return msrReady
	}
	var v uint8
	for _, wire := range []struct{ out, in uint8 }{{mcrRTS, msrCTS}, {mcrDTR, msrDSR}, {mcrOut1, msrRI}, {mcrOut2, msrDCD}} {
		if s.mcr&wire.out != 0 {
			v |= wire.in
		}
	}
	return v
}

// Write takes a write to a register (0-7).
func (s *Serial) Write(reg uint16, v uint8) {
	s.mu.Lock()
	defer s.mu.Unlock()
	dlab := s.lcr&lcrDLAB != 0
	switch reg {
	case regData:
		if dlab {
			s.divisorLow = v
			return
		}
		if s.mcr&mcrLoop == 0 {
			_, _ = s.out.Write([]byte{v})
		}
		s.emptyLocked()
	case regIER:
		if dlab {
			s.divisorHigh = v
			return
		}
		rising := v &^ s.ier & ierTHRE
		s.ier = v & ierMask
		if rising != 0 {
			s.emptyLocked()
		}
	case regIIR:
		s.fcr = v
	case regLCR:
		s.lcr = v
	case regMCR:
		s.mcr = v & mcrMask
	case regSCR:
		s.scr = v
	}
}

// emptyLocked makes the transmitter-empty interrupt pending.
func (s *Serial) emptyLocked() {
	s.transmitterEmptyUnreported = true
	if s.ier&ierTHRE != 0 {
		s.irq()
	}
}

// serialStateBytes is the length of Save's answer: seven registers and a flag.
const serialStateBytes = 8

// Save returns the registers.
func (s *Serial) Save() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	pending := uint8(0)
	if s.transmitterEmptyUnreported {
		pending = 1
	}
	return []byte{s.ier, s.fcr, s.lcr, s.mcr, s.scr, s.divisorLow, s.divisorHigh, pending}
}

// Load takes what Save returned.
func (s *Serial) Load(state []byte) error {
	if len(state) != serialStateBytes || state[7] > 1 {
		return errors.New("serial port state is malformed")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ier, s.fcr, s.lcr, s.mcr, s.scr = state[0]&ierMask, state[1], state[2], state[3]&mcrMask, state[4]
	s.divisorLow, s.divisorHigh = state[5], state[6]
	s.transmitterEmptyUnreported = state[7] == 1
	return nil
}

// Resume raises the interrupt again if the driver waits for one: an edge that was on its way when the machine was saved is
// lost, and a driver that waits for "transmitter empty" would wait for ever.
func (s *Serial) Resume() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ier&ierTHRE != 0 {
		s.emptyLocked()
	}
}
