package wire_test

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"

	"torpor/tools/hostvm/wire"
)

func TestFramesComeBackInOrder(t *testing.T) {
	var b bytes.Buffer
	want := []wire.Frame{
		{Type: wire.Start, Payload: []byte(`{"shell":"true"}`)},
		{Type: wire.Stdin, Payload: []byte{}},
		{Type: wire.Stdout, Payload: bytes.Repeat([]byte{7}, wire.MaxPayload)},
		{Type: wire.Alive, Payload: []byte{}},
	}
	for _, f := range want {
		if err := wire.Write(&b, f.Type, f.Payload); err != nil {
			t.Fatal(err)
		}
	}
	for i, w := range want {
		got, err := wire.Read(&b)
		if err != nil || got.Type != w.Type || !bytes.Equal(got.Payload, w.Payload) {
			t.Fatalf("frame %d: got %c with %d bytes, %v", i, got.Type, len(got.Payload), err)
		}
	}
	if _, err := wire.Read(&b); !errors.Is(err, io.EOF) {
		t.Fatalf("after the last frame: %v, want EOF", err)
	}
}

func TestReadRefusesWhatIsNoFrame(t *testing.T) {
	for name, c := range map[string]struct {
		in   string
		want error
	}{
		"nothing":           {"", io.EOF},
		"half a header":     {"S\x00", io.ErrUnexpectedEOF},
		"half a payload":    {"S\x00\x00\x00\x04ab", io.ErrUnexpectedEOF},
		"no payload at all": {"S\x00\x00\x00\x04", io.ErrUnexpectedEOF},
		"unknown type":      {"?\x00\x00\x00\x00", wire.ErrFrame},
		"one byte too long": {"O\x00\x01\x00\x01", wire.ErrFrame},
		"longest length":    {"O\xff\xff\xff\xff", wire.ErrFrame},
		"an HTTP request":   {"GET / HTTP/1.1\r\n", wire.ErrFrame},
	} {
		if _, err := wire.Read(strings.NewReader(c.in)); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	if err := wire.Write(io.Discard, wire.Stdout, make([]byte, wire.MaxPayload+1)); !errors.Is(err, wire.ErrFrame) {
		t.Errorf("too long a payload was written: %v", err)
	}
}

func TestDecodeNamesTheFrame(t *testing.T) {
	var c wire.Command
	err := wire.Frame{Type: wire.Start, Payload: []byte("{")}.Decode(&c)
	if !errors.Is(err, wire.ErrFrame) || !strings.Contains(err.Error(), "S payload") {
		t.Fatalf("got %v", err)
	}
}

// What is read is written back byte for byte, or refused; nothing else.
func FuzzRead(f *testing.F) {
	f.Add([]byte("S\x00\x00\x00\x02{}"))
	f.Add([]byte("I\x00\x00\x00\x00"))
	f.Add([]byte("X\x00\x00\x00\x0a{\"code\":1}"))
	f.Add([]byte("O\xff\xff\xff\xff"))
	f.Add([]byte("?"))
	f.Fuzz(func(t *testing.T, in []byte) {
		r := bytes.NewReader(in)
		frame, err := wire.Read(r)
		if err != nil {
			if !errors.Is(err, wire.ErrFrame) && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Fatalf("an error of no kind: %v", err)
			}
			return
		}
		var out bytes.Buffer
		if err := wire.Write(&out, frame.Type, frame.Payload); err != nil {
			t.Fatal(err)
		}
		if read := in[:len(in)-r.Len()]; !bytes.Equal(out.Bytes(), read) {
			t.Fatalf("read %x, wrote %x", read, out.Bytes())
		}
	})
}
