package legacy

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
)

const (
	// DefaultLogBytes bounds a console log unless told otherwise.
	DefaultLogBytes = 256 << 10
	// minLogBytes keeps trimming rare.
	minLogBytes = 4 << 10
	// tailBytes is how much of the newest output is kept in memory.
	tailBytes = 4 << 10
	// batchBytes is the most output that waits for a line break before it is written.
	batchBytes = 512
)

// Log is a file that keeps the newest bytes written to it, and an in-memory tail. A log without a file keeps the tail only.
// Output reaches the file at line breaks, so that a character written is not a system call. Safe for concurrent use.
type Log struct {
	max int64

	mu    sync.Mutex
	file  *os.File // nil: none
	size  int64
	batch []byte
	tail  []byte // up to 2*tailBytes; its last tailBytes count
	err   error  // the first write error; output is dropped after it
}

// NewLog goes on at the end of a file that is open for reading and writing and not for appending, which is the log's from
// then on, whatever comes of it; nil makes a log without a file. limit is the file's greatest size in bytes, 0 for
// DefaultLogBytes.
func NewLog(f *os.File, limit uint64) (*Log, error) {
	if limit == 0 {
		limit = DefaultLogBytes
	}
	l := &Log{max: int64(min(max(limit, minLogBytes), 1<<40))}
	if f == nil {
		return l, nil
	}
	info, err := f.Stat()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open console log: %w", err), f.Close())
	}
	l.file, l.size = f, info.Size()
	return l, nil
}

// Write takes console output. It never fails: a guest is not stopped because its log cannot be kept; Err tells.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tail = append(l.tail, p...)
	if len(l.tail) > 2*tailBytes {
		l.tail = append(l.tail[:0], l.tail[len(l.tail)-tailBytes:]...)
	}
	if l.file == nil || l.err != nil || len(p) == 0 {
		return len(p), nil
	}
	l.batch = append(l.batch, p[max(0, len(p)-minLogBytes/2):]...)
	if len(l.batch) >= batchBytes || l.batch[len(l.batch)-1] == '\n' {
		l.flushLocked()
	}
	return len(p), nil
}

// Flush writes what waits for a line break.
func (l *Log) Flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.flushLocked()
}

// Tail returns the newest n bytes at most, and never more than 4 KiB.
func (l *Log) Tail(n int) []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	n = min(n, len(l.tail), tailBytes)
	return append([]byte(nil), l.tail[len(l.tail)-n:]...)
}

// Err returns the first error of the file, nil while it is well.
func (l *Log) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// Close flushes and closes the file.
func (l *Log) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.flushLocked()
	if l.file == nil {
		return l.err
	}
	err := l.file.Close()
	l.file = nil
	if l.err != nil {
		return l.err
	}
	return err
}

func (l *Log) flushLocked() {
	if l.file == nil || l.err != nil || len(l.batch) == 0 {
		return
	}
	if l.size+int64(len(l.batch)) > l.max {
		l.err = l.trimLocked()
	}
	if l.err == nil {
		var n int
		n, l.err = l.file.WriteAt(l.batch, l.size)
		l.size += int64(n)
	}
	l.batch = l.batch[:0]
}

// trimLocked moves the newest half of the file to its beginning and cuts off the rest. Whoever reads the file at that moment may
// see lines twice. Another file by rename would not show that, but takes a directory, which this process has none of.
func (l *Log) trimLocked() error {
	keep := make([]byte, min(l.max/2, l.size))
	if _, err := l.file.ReadAt(keep, l.size-int64(len(keep))); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("trim console log: %w", err)
	}
	if _, err := l.file.WriteAt(keep, 0); err != nil {
		return fmt.Errorf("trim console log: %w", err)
	}
	if err := l.file.Truncate(int64(len(keep))); err != nil {
		return fmt.Errorf("trim console log: %w", err)
	}
	l.size = int64(len(keep))
	return nil
}
