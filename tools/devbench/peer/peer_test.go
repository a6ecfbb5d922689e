package peer

import (
	"io"
	"net"
	"testing"
)

func TestEveryMode(t *testing.T) {
	host, guest := net.Pipe()
	served := make(chan error, 1)
	go func() { served <- Serve(host) }()
	const n = 200_000
	var one [1]byte
	steps := []func() error{
		func() error { return Ask(guest, Sink, n) },
		func() error { return Send(guest, n) },
		func() error { _, err := io.ReadFull(guest, one[:]); return err },
		func() error { return Ask(guest, Give, n) },
		func() error { return Receive(guest, n) },
		func() error { return Ask(guest, Echo, 1) },
		func() error { _, err := guest.Write([]byte{7}); return err },
		func() error { _, err := io.ReadFull(guest, one[:]); return err },
		guest.Close,
	}
	for i, step := range steps {
		if err := step(); err != nil {
			t.Fatalf("step %d: %v", i, err)
		}
	}
	if err := <-served; err != nil || one[0] != 7 {
		t.Errorf("served %v, echoed %d", err, one[0])
	}
}

func TestUnknownModeEndsTheConnection(t *testing.T) {
	host, guest := net.Pipe()
	served := make(chan error, 1)
	go func() { served <- Serve(host) }()
	if err := Ask(guest, 'x', 1); err != nil {
		t.Fatal(err)
	}
	if err := <-served; err == nil {
		t.Error("served an unknown mode")
	}
}
