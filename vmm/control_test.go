package main

import (
	"context"
	"encoding/binary"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/containerd/ttrpc"
	"github.com/rs/zerolog"
	"google.golang.org/protobuf/proto"

	"torpor/api/apierr"
	"torpor/api/fdpass"
	"torpor/api/vmmpb"
)

// serveTest serves a process without a machine on a socket of its own and returns its path.
func serveTest(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	listen := func(name, network string) *net.UnixListener {
		l, err := net.ListenUnix(network, &net.UnixAddr{Name: filepath.Join(dir, name), Net: network})
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	control, files, vsock := listen("control", "unix"), listen("files", "unixpacket"), listen("vsock", "unix")
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() {
		served <- serve(ctx, control, newServer(nil, fdpass.NewInbox(files), vsock, zerolog.Nop()))
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return control.Addr().String()
}

func dialTest(t testing.TB, path string) vmmpb.VMMService {
	t.Helper()
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	client := ttrpc.NewClient(c)
	t.Cleanup(func() { _ = client.Close() })
	return vmmpb.NewVMMClient(client)
}

// Calls that need a machine are refused by code as long as there is none.
func TestCallsWithoutAMachine(t *testing.T) {
	c := dialTest(t, serveTest(t))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for name, call := range map[string]func() error{
		"Pause":        func() error { _, err := c.Pause(ctx, &vmmpb.PauseRequest{}); return err },
		"Resume":       func() error { _, err := c.Resume(ctx, &vmmpb.ResumeRequest{}); return err },
		"Save":         func() error { _, err := c.Save(ctx, &vmmpb.SaveRequest{}); return err },
		"Checkpoint":   func() error { _, err := c.Checkpoint(ctx, &vmmpb.CheckpointRequest{}); return err },
		"Wait":         func() error { _, err := c.Wait(ctx, &vmmpb.WaitRequest{}); return err },
		"WorkingSet":   func() error { _, err := c.WorkingSet(ctx, &vmmpb.WorkingSetRequest{}); return err },
		"Prepare":      func() error { _, err := c.Prepare(ctx, &vmmpb.PrepareRequest{}); return err },
		"SetBalloon":   func() error { _, err := c.SetBalloon(ctx, &vmmpb.SetBalloonRequest{}); return err },
		"BalloonStats": func() error { _, err := c.BalloonStats(ctx, &vmmpb.BalloonStatsRequest{}); return err },
		"Boot":         func() error { _, err := c.Boot(ctx, &vmmpb.BootRequest{}); return err },
		"Restore":      func() error { _, err := c.Restore(ctx, &vmmpb.RestoreRequest{}); return err },
	} {
		if err := apierr.FromStatus(call()); apierr.As(err).Code != apierr.BadRequest {
			t.Errorf("%s: %v", name, err)
		}
	}
	if s, err := c.Status(ctx, &vmmpb.StatusRequest{}); err != nil || s.GetState() != "idle" || s.GetBalloon() != nil {
		t.Errorf("status %v, %v", s, err)
	}
}

// frame is a ttrpc message: length, stream, type, flags, body (ttrpc's PROTOCOL.md).
func frame(stream uint32, kind, flags byte, body []byte) []byte {
	b := binary.BigEndian.AppendUint32(nil, uint32(len(body)))
	b = binary.BigEndian.AppendUint32(b, stream)
	return append(append(b, kind, flags), body...)
}

func request(t testing.TB, method string, m proto.Message) []byte {
	t.Helper()
	payload, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	body, err := proto.Marshal(&ttrpc.Request{Service: "torpor.vmm.VMM", Method: method, Payload: payload})
	if err != nil {
		t.Fatal(err)
	}
	return frame(1, 1, 0, body)
}

// FuzzControl writes any bytes to the control socket, also as the payload of a well-formed call of any method. The process
// goes on serving others. No machine is ever made: that would take files which do not exist.
func FuzzControl(f *testing.F) {
	path := serveTest(f)
	f.Add(request(f, "Status", &vmmpb.StatusRequest{}), uint8(0))
	f.Add(request(f, "Boot", &vmmpb.BootRequest{Machine: &vmmpb.Machine{Vcpus: 1, MemoryBytes: 128 << 20}, Kernel: "/nonexistent"}), uint8(1))
	f.Add(request(f, "Nothing", &vmmpb.StatusRequest{}), uint8(2))
	f.Add(frame(2, 9, 0xff, []byte("odd")), uint8(3))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"), uint8(4))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0, 0, 0, 1, 1, 0}, uint8(5))
	f.Add([]byte{0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f}, uint8(6))
	c := dialTest(f, path)
	methods := []string{"Restore", "Pause", "Resume", "Save", "Checkpoint", "Status", "SetBalloon", "BalloonStats"}
	f.Fuzz(func(t *testing.T, raw []byte, method uint8) {
		body, err := proto.Marshal(&ttrpc.Request{Service: "torpor.vmm.VMM", Method: methods[int(method)%len(methods)], Payload: raw})
		if err != nil {
			t.Skip() // a string in it is no UTF-8
		}
		for _, bytes := range [][]byte{raw, frame(1, 1, 0, body)} {
			peer, err := net.Dial("unix", path)
			if err != nil {
				t.Fatal(err)
			}
			_, _ = peer.Write(bytes) // it may hang up at once
			_ = peer.Close()
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if s, err := c.Status(ctx, &vmmpb.StatusRequest{}); err != nil || s.GetState() != "idle" {
			t.Fatalf("status %v, %v", s, err)
		}
	})
}
