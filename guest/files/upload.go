package files

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"mime"
	"mime/multipart"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"torpor/guest/env"
	"torpor/guest/filesystem"
)

// Written describes one file of an upload.
type Written struct {
	Path     string            `json:"path"`
	Name     string            `json:"name"`
	Type     string            `json:"type"` // always "file"
	Metadata map[string]string `json:"metadata,omitempty"`
}

// upload writes the files of a request in the order they arrive. Files already written stay if a later one fails.
func (h *Handler) upload(w http.ResponseWriter, r *http.Request, u env.User, q url.Values) error {
	meta, err := metadata(r.Header)
	if err != nil {
		return err
	}
	body, err := plainBody(r)
	if err != nil {
		return err
	}
	up := &upload{handler: h, user: u, meta: meta, size: r.ContentLength, written: []Written{}}
	kind, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil {
		return &Error{http.StatusBadRequest, "Content-Type is missing or malformed: use multipart/form-data or application/octet-stream"}
	}
	switch kind {
	case "multipart/form-data":
		if params["boundary"] == "" {
			return &Error{http.StatusBadRequest, "Content-Type multipart/form-data has no boundary"}
		}
		err = up.parts(multipart.NewReader(body, params["boundary"]), q)
	case "application/octet-stream":
		if q.Get("path") == "" {
			return &Error{http.StatusBadRequest, "query parameter path is required for application/octet-stream"}
		}
		err = up.file(q.Get("path"), body)
	default:
		return &Error{http.StatusBadRequest, fmt.Sprintf("Content-Type %q is not supported: use multipart/form-data or application/octet-stream", kind)}
	}
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	_ = json.NewEncoder(w).Encode(up.written) // the client has gone
	return nil
}

// plainBody undoes the request's Content-Encoding.
func plainBody(r *http.Request) (io.Reader, error) {
	switch coding := strings.ToLower(strings.TrimSpace(r.Header.Get("Content-Encoding"))); coding {
	case "", "identity":
		return r.Body, nil
	case "gzip":
		zip, err := gzip.NewReader(r.Body)
		if err != nil {
			return nil, &Error{http.StatusBadRequest, "body is not gzip: " + err.Error()}
		}
		return zip, nil
	default:
		return nil, &Error{http.StatusBadRequest, fmt.Sprintf("Content-Encoding %q is not supported: use gzip", coding)}
	}
}

// metadata collects the X-Metadata-* headers.
func metadata(h http.Header) (map[string]string, error) {
	meta, total := map[string]string{}, 0
	for name, values := range h {
		key, ok := strings.CutPrefix(strings.ToLower(name), "x-metadata-")
		if !ok || len(values) == 0 {
			continue
		}
		if key == "" || len(key) > filesystem.MaxMetadataKey {
			return nil, &Error{http.StatusBadRequest, fmt.Sprintf("metadata key of header %q must have 1 to %d bytes", name, filesystem.MaxMetadataKey)}
		}
		meta[key] = values[0]
		total += len(key) + len(values[0])
	}
	if total > filesystem.MaxMetadataTotal {
		return nil, &Error{http.StatusBadRequest, fmt.Sprintf("metadata has %d bytes, more than %d", total, filesystem.MaxMetadataTotal)}
	}
	return meta, nil
}

// upload is the state of one request.
type upload struct {
	handler *Handler
	user    env.User
	meta    map[string]string
	size    int64 // of the whole body, -1 if unknown
	written []Written
}

func (up *upload) parts(parts *multipart.Reader, q url.Values) error {
	for {
		part, err := parts.NextRawPart()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return &Error{http.StatusBadRequest, "reading the multipart body: " + err.Error()}
		}
		name, filename := partFile(part.Header.Get("Content-Disposition"))
		if name != "file" {
			continue
		}
		path := q.Get("path")
		if path == "" {
			path = filename
		}
		if path == "" {
			return &Error{http.StatusBadRequest, "no path: neither query parameter path nor the part's filename is set"}
		}
		if err := up.file(path, part); err != nil {
			return err
		}
	}
}

// file writes one file from its body.
func (up *upload) file(path string, body io.Reader) error {
	abs, err := up.handler.store.Resolve(up.user, path)
	if err != nil {
		return err
	}
	for _, w := range up.written {
		if w.Path == abs {
			return &Error{http.StatusBadRequest, fmt.Sprintf("path '%s' is given twice in one request", abs)}
		}
	}
	if err := up.write(abs, body); err != nil {
		return writeError(abs, err)
	}
	up.written = append(up.written, Written{Path: abs, Name: filepath.Base(abs), Type: "file", Metadata: up.meta})
	return nil
}

// write fills the file in place, in the order create, chown, write: watchers see exactly these events. A file made here
// is removed again if its body does not arrive whole.
func (up *upload) write(path string, body io.Reader) (err error) {
	uid, gid := int(up.user.UID), int(up.user.GID)
	if err := filesystem.MakeDirs(filepath.Dir(path), uid, gid); err != nil {
		return err
	}
	if err := up.room(path); err != nil {
		return err
	}
	f, created, err := openTarget(path)
	if err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, f.Close())
		if err != nil && created {
			err = errors.Join(err, os.Remove(path))
		}
	}()
	if err := f.Chown(uid, gid); err != nil {
		return err
	}
	if err := filesystem.SetMetadata(int(f.Fd()), path, up.meta); err != nil {
		return err
	}
	if info, err := f.Stat(); err != nil {
		return err
	} else if info.Size() > 0 {
		if err := f.Truncate(0); err != nil {
			return err
		}
	}
	if _, err := io.Copy(f, incoming{body}); err != nil {
		return err
	}
	return nil
}

// room refuses a body that cannot fit before an existing file is emptied for it.
func (up *upload) room(path string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(path), &st); err != nil {
		return nil // the write itself will tell
	}
	free := int64(st.Bfree) * st.Frsize
	if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
		free += info.Size()
	}
	if up.size > free {
		return unix.ENOSPC
	}
	return nil
}

// openTarget opens path for writing without emptying it, and tells whether it was made.
func openTarget(path string) (f *os.File, created bool, err error) {
	if info, err := os.Stat(path); err == nil {
		switch {
		case info.IsDir():
			return nil, false, &Error{http.StatusBadRequest, fmt.Sprintf("path '%s' is a directory", path)}
		case !info.Mode().IsRegular():
			return nil, false, &Error{http.StatusBadRequest, fmt.Sprintf("path '%s' is not a regular file", path)}
		}
		f, err = os.OpenFile(path, os.O_WRONLY, 0)
		return f, false, err
	}
	f, err = os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if errors.Is(err, fs.ErrExist) { // a link to nothing, or made just now
		f, err = os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o666)
		return f, false, err
	}
	return f, true, err
}

// incoming marks errors of the body, which are the client's, from those of the file.
type incoming struct{ body io.Reader }

type bodyError struct{ err error }

func (e *bodyError) Error() string { return "reading the body: " + e.err.Error() }
func (e *bodyError) Unwrap() error { return e.err }

func (in incoming) Read(p []byte) (int, error) {
	n, err := in.body.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = &bodyError{err}
	}
	return n, err
}

// writeError gives an error of one file its status.
func writeError(path string, err error) error {
	var told *Error
	var body *bodyError
	switch {
	case errors.As(err, &told):
		return told
	case errors.As(err, &body):
		return &Error{http.StatusBadRequest, fmt.Sprintf("writing '%s': %v", path, body)}
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return &Error{http.StatusInsufficientStorage, "not enough disk space available"}
	case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.ENAMETOOLONG), errors.Is(err, syscall.ELOOP), errors.Is(err, syscall.EISDIR):
		return &Error{http.StatusBadRequest, fmt.Sprintf("path '%s' cannot be written: %v", path, err)}
	}
	return fmt.Errorf("writing '%s': %w", path, err)
}
