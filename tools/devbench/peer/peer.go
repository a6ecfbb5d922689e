// Package peer is the wire protocol between the workload in the guest and the host that serves it, the same over vsock and TCP:
// a request of 9 bytes, a mode and a number of bytes (little endian), and what the mode says.
package peer

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
)

// Port is where the host listens, for vsock and TCP alike.
const Port = 5000

// The modes of a request.
const (
	Echo = 'e' // bytes come back one by one
	Sink = 's' // bytes are taken; one comes back at the end
	Give = 'g' // bytes are sent
)

// chunk is the size of a read or write of a bulk transfer.
const chunk = 64 << 10

// Ask begins a transfer of n bytes.
func Ask(w io.Writer, mode byte, n uint64) error {
	_, err := w.Write(binary.LittleEndian.AppendUint64([]byte{mode}, n))
	return err
}

// Send writes n bytes.
func Send(w io.Writer, n uint64) error {
	for buf := make([]byte, chunk); n > 0; {
		part := min(n, chunk)
		if _, err := w.Write(buf[:part]); err != nil {
			return err
		}
		n -= part
	}
	return nil
}

// Receive reads n bytes.
func Receive(r io.Reader, n uint64) error {
	for buf := make([]byte, chunk); n > 0; {
		got, err := r.Read(buf[:min(n, chunk)])
		if err != nil {
			return err
		}
		n -= uint64(got)
	}
	return nil
}

// Serve answers one connection until its end.
func Serve(c net.Conn) error {
	defer c.Close()
	for {
		var head [9]byte
		if _, err := io.ReadFull(c, head[:]); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		if err := serve(c, head[0], binary.LittleEndian.Uint64(head[1:])); err != nil {
			return err
		}
	}
}

func serve(c net.Conn, mode byte, n uint64) error {
	switch mode {
	case Sink:
		if err := Receive(c, n); err != nil {
			return err
		}
		_, err := c.Write([]byte{1})
		return err
	case Give:
		return Send(c, n)
	case Echo:
		var b [1]byte
		for range n {
			if _, err := io.ReadFull(c, b[:]); err != nil {
				return err
			}
			if _, err := c.Write(b[:]); err != nil {
				return err
			}
		}
		return nil
	}
	return fmt.Errorf("unknown mode %q", mode)
}
