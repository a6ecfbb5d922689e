package files

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestUploadOfSeveral(t *testing.T) {
	h := newHarness(t, "")
	abs := filepath.Join(h.home, "top", "0", "a.txt")
	body, kind := form(
		part{`name="file"; filename="` + abs + `"`, "one"},
		part{`name="note"`, "ignored"},
		part{`name="file"; filename="dir/ä b.txt"`, "two"},
		part{`name="file"; filename="q%22u\o%20te"`, ""},
		part{`filename=plain%20name; name=file`, "four"},
		part{`name="file"; filename="x"; filename*=UTF-8''%E4%BD%A0%2Fok`, "five"},
	)
	resp, text := h.do("POST", nil, body, "Content-Type", kind)
	var written []map[string]string
	if err := json.Unmarshal([]byte(text), &written); err != nil || resp.StatusCode != 200 {
		t.Fatalf("%s %s", resp.Status, text)
	}
	want := map[string]string{
		"top/0/a.txt": "one", "dir/ä b.txt": "two", `q"u\o%20te`: "", "plain name": "four", "你/ok": "five",
	}
	if len(written) != len(want) || written[0]["path"] != abs || written[0]["name"] != "a.txt" || written[0]["type"] != "file" || len(written[0]) != 3 {
		t.Errorf("answer %s", text)
	}
	for name, content := range want {
		if got := h.read(name); got != content {
			t.Errorf("%s holds %q", name, got)
		}
	}
	if info, err := os.Stat(abs); err != nil || info.Mode().Perm()&^0o022 != 0o644 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if info, err := os.Stat(filepath.Dir(abs)); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("parent's mode %v, %v", info.Mode(), err)
	}
}

func TestUploadOfOne(t *testing.T) {
	h := newHarness(t, "")
	for _, content := range []string{"a longer content", "short", ""} {
		body, kind := form(part{`name="file"; filename="blob"`, content})
		resp, text := h.do("POST", url.Values{"path": {"f.txt"}}, body, "Content-Type", kind)
		if want := fmt.Sprintf(`[{"path":"%s/f.txt","name":"f.txt","type":"file"}]`, h.home); resp.StatusCode != 200 || strings.TrimSpace(text) != want {
			t.Errorf("%s %s", resp.Status, text)
		}
		if got := h.read("f.txt"); got != content {
			t.Errorf("holds %q, want %q", got, content)
		}
	}
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	_, _ = io.WriteString(z, "unpacked")
	_ = z.Close()
	q := url.Values{"path": {"~/sub/g"}}
	chunked := io.MultiReader(&zipped) // of unknown length
	if resp, text := h.do("POST", q, chunked, "Content-Type", "application/octet-stream", "Content-Encoding", "gzip"); resp.StatusCode != 200 {
		t.Errorf("gzip: %s %s", resp.Status, text)
	}
	if got := h.read("sub/g"); got != "unpacked" {
		t.Errorf("gzip: holds %q", got)
	}
}

func TestRefusedUploads(t *testing.T) {
	h := newHarness(t, "")
	if err := os.MkdirAll(h.home+"/dir", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(h.home+"/file", []byte("kept"), 0o644); err != nil {
		t.Fatal(err)
	}
	twice, kind := form(part{`name="file"; filename="same"`, "1"}, part{`name="file"; filename="./same"`, "2"})
	nameless, _ := form(part{`name="file"`, "1"})
	cut := strings.NewReader("--xyz\r\nContent-Disposition: form-data; name=\"file\"; filename=\"cut\"\r\n\r\nhalf")
	const raw = "application/octet-stream"
	for _, test := range []struct {
		name, path, kind, coding, message string
		body                              io.Reader
		status                            int
	}{
		{"twice", "", kind, "", "given twice", twice, 400},
		{"nameless", "", kind, "", "no path", nameless, 400},
		{"cut", "", kind, "", "body", cut, 400},
		{"no boundary", "x", "multipart/form-data", "", "boundary", strings.NewReader(""), 400},
		{"no type", "x", "", "", "Content-Type", strings.NewReader(""), 400},
		{"other type", "x", "text/plain", "", "not supported", strings.NewReader(""), 400},
		{"no path", "", raw, "", "path is required", strings.NewReader("x"), 400},
		{"directory", "dir", raw, "", "is a directory", strings.NewReader("x"), 400},
		{"below a file", "file/x", raw, "", "not a directory", strings.NewReader("x"), 400},
		{"home of another", "~bob/x", raw, "", "another user", strings.NewReader("x"), 400},
		{"not gzip", "x", raw, "gzip", "not gzip", strings.NewReader("x"), 400},
		{"coding", "x", raw, "br", "not supported", strings.NewReader("x"), 400},
		{"long name", strings.Repeat("n", 300), raw, "", "cannot be written", strings.NewReader("x"), 400},
	} {
		resp, text := h.do("POST", url.Values{"path": {test.path}}, test.body, "Content-Type", test.kind, "Content-Encoding", test.coding)
		var e Error
		if err := json.Unmarshal([]byte(text), &e); err != nil || resp.StatusCode != test.status || e.Code != test.status || !strings.Contains(e.Message, test.message) {
			t.Errorf("%s: %s %s", test.name, resp.Status, text)
		}
	}
	if got := h.read("file"); got != "kept" {
		t.Errorf("a refused upload changed a file to %q", got)
	}
	if _, err := os.Stat(h.home + "/cut"); err == nil {
		t.Error("half a file was left behind")
	}
}

func TestUploadedMetadata(t *testing.T) {
	h := newHarness(t, "")
	probe := h.home + "/probe"
	if err := os.WriteFile(probe, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setxattr(probe, "user.x", nil, 0); err != nil {
		t.Skipf("no extended attributes here: %v", err)
	}
	q := url.Values{"path": {"m"}}
	put := func(headers ...string) (*http.Response, string) {
		return h.do("POST", q, strings.NewReader("x"), append(headers, "Content-Type", "application/octet-stream")...)
	}
	if resp, text := put("X-Metadata-Kind", "A b", "X-Metadata-N", "1"); resp.StatusCode != 200 || !strings.Contains(text, `"metadata":{"kind":"A b","n":"1"}`) {
		t.Errorf("%s %s", resp.Status, text)
	}
	value := make([]byte, 64)
	if n, err := unix.Getxattr(h.home+"/m", "user.e2b.kind", value); err != nil || string(value[:n]) != "A b" {
		t.Errorf("attribute %q, %v", value[:max(n, 0)], err)
	}
	if resp, text := put(); resp.StatusCode != 200 || strings.Contains(text, "metadata") {
		t.Errorf("%s %s", resp.Status, text)
	}
	if _, err := unix.Getxattr(h.home+"/m", "user.e2b.kind", value); err == nil {
		t.Error("old metadata survived a write without any")
	}
	for _, header := range []string{"X-Metadata-" + strings.Repeat("k", 247), "X-Metadata-"} {
		if resp, _ := put(header, "v"); resp.StatusCode != 400 {
			t.Errorf("key %q: %s", header, resp.Status)
		}
	}
	if resp, _ := put("X-Metadata-Big", strings.Repeat("v", 4094)); resp.StatusCode != 400 {
		t.Errorf("too much metadata: %s", resp.Status)
	}
}

func TestDiskFull(t *testing.T) {
	h := newHarness(t, "")
	small := h.home + "/small"
	if err := os.Mkdir(small, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", small, "tmpfs", 0, "size=128k"); err != nil {
		t.Skipf("mounting needs root: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(small, unix.MNT_DETACH) })
	big := strings.Repeat("x", 1<<20)
	q := url.Values{"path": {"small/f"}}
	const full = `{"code":507,"message":"not enough disk space available"}`
	put := func(body io.Reader) (int, string) {
		resp, text := h.do("POST", q, body, "Content-Type", "application/octet-stream")
		return resp.StatusCode, strings.TrimSpace(text)
	}
	if code, text := put(strings.NewReader("old")); code != 200 {
		t.Fatal(code, text)
	}
	if code, text := put(strings.NewReader(big)); code != 507 || text != full {
		t.Errorf("%d %s", code, text)
	}
	if got := h.read("small/f"); got != "old" {
		t.Errorf("a body that could not fit destroyed the file: %q", got)
	}
	q.Set("path", "small/new")
	if code, text := put(io.MultiReader(strings.NewReader(big))); code != 507 || text != full {
		t.Errorf("unknown length: %d %s", code, text)
	}
	if _, err := os.Stat(small + "/new"); err == nil {
		t.Error("a part of a file was left behind")
	}
}

func TestDownload(t *testing.T) {
	h := newHarness(t, "")
	content := strings.Repeat("0123456789", 1000)
	for name, text := range map[string]string{"f.txt": content, "empty": "", "ü.bin": "\x00\x01"} {
		if err := os.WriteFile(filepath.Join(h.home, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	resp, text := h.get("f.txt")
	head := resp.Header
	if resp.StatusCode != 200 || text != content || head.Get("Content-Length") != "10000" || head.Get("Last-Modified") == "" ||
		head.Get("Vary") != "Accept-Encoding" || head.Get("Content-Disposition") != "inline; filename=f.txt" ||
		!strings.HasPrefix(head.Get("Content-Type"), "text/plain") || head.Get("Content-Encoding") != "" {
		t.Errorf("%s %v, %d bytes", resp.Status, head, len(text))
	}
	if resp, text = h.get("f.txt", "Range", "bytes=5-9", "Accept-Encoding", "gzip"); resp.StatusCode != 206 || text != "56789" {
		t.Errorf("range: %s %q", resp.Status, text)
	}
	if resp, _ = h.get("f.txt", "If-Modified-Since", head.Get("Last-Modified")); resp.StatusCode != 304 {
		t.Errorf("not modified: %s", resp.Status)
	}
	resp, text = h.get("f.txt", "Accept-Encoding", "gzip, deflate")
	if resp.Header.Get("Content-Encoding") != "gzip" || unzip(t, text) != content {
		t.Errorf("gzip: %s %v", resp.Status, resp.Header)
	}
	if resp, text = h.get("empty"); resp.StatusCode != 200 || text != "" || resp.Header.Get("Content-Length") != "0" {
		t.Errorf("empty: %s %v", resp.Status, resp.Header)
	}
	if resp, text = h.get("empty", "Accept-Encoding", "gzip"); unzip(t, text) != "" {
		t.Errorf("empty by gzip: %s %q", resp.Status, text)
	}
	if resp, text = h.get("ü.bin"); text != "\x00\x01" {
		t.Errorf("unicode: %s %q %v", resp.Status, text, resp.Header)
	}
	for _, coding := range []string{"", "gzip"} {
		if _, text = h.get("/proc/sys/kernel/random/boot_id", "Accept-Encoding", coding); coding == "gzip" {
			text = unzip(t, text)
		}
		if len(strings.TrimSpace(text)) != 36 {
			t.Errorf("a file of /proc, coding %q: %q", coding, text)
		}
	}
	if resp, _ = h.do("HEAD", url.Values{"path": {"f.txt"}}, nil); resp.StatusCode != 200 || resp.ContentLength != 10000 {
		t.Errorf("HEAD: %s %d", resp.Status, resp.ContentLength)
	}
}

func unzip(t *testing.T, s string) string {
	t.Helper()
	z, err := gzip.NewReader(strings.NewReader(s))
	if err != nil {
		t.Error(err)
		return ""
	}
	text, err := io.ReadAll(z)
	if err != nil {
		t.Error(err)
	}
	return string(text)
}

func TestRefusedDownloads(t *testing.T) {
	h := newHarness(t, "")
	if err := unix.Mkfifo(h.home+"/fifo", 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(h.home+"/f", []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		q       url.Values
		accept  string
		status  int
		message string
	}{
		{url.Values{"path": {"nope"}}, "", 404, "path '" + h.home + "/nope' does not exist"},
		{url.Values{}, "", 400, "path '" + h.home + "' is a directory"},
		{url.Values{"path": {"fifo"}}, "", 400, "not a regular file"},
		{url.Values{"path": {"/dev/zero"}}, "", 400, "not a regular file"},
		{url.Values{"path": {"f/x"}}, "", 400, "cannot be read"},
		{url.Values{"path": {"f"}}, "identity;q=0, br", 406, "acceptable"},
		{url.Values{"path": {"f"}, "username": {"bob"}}, "", 401, "invalid username: 'bob'"},
	} {
		resp, text := h.do("GET", test.q, nil, "Accept-Encoding", test.accept)
		var e Error
		if err := json.Unmarshal([]byte(text), &e); err != nil || resp.StatusCode != test.status || e.Code != test.status || !strings.Contains(e.Message, test.message) {
			t.Errorf("%v: %s %s", test.q, resp.Status, text)
		}
	}
	if resp, _ := h.do("DELETE", nil, nil); resp.StatusCode != 405 {
		t.Errorf("DELETE: %s", resp.Status)
	}
}

func TestAuthorisation(t *testing.T) {
	const token = "secret token"
	h := newHarness(t, token)
	now := time.Unix(1_000_000, 0)
	h.handler.now = func() time.Time { return now }
	if err := os.WriteFile(h.home+"/f", []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	signed := func(path, op, user, exp string, more ...string) url.Values {
		q := url.Values{"path": {path}, "signature": {sign(path, op, user, token, exp)}}
		if user != "" {
			q.Set("username", user)
		}
		if exp != "" {
			q.Set("signature_expiration", exp)
		}
		for i := 0; i < len(more); i += 2 {
			q.Set(more[i], more[i+1])
		}
		return q
	}
	for _, test := range []struct {
		name, header string
		q            url.Values
		want         string // "" is 200
	}{
		{"nothing", "", url.Values{"path": {"f"}}, "missing signature query parameter"},
		{"header", token, url.Values{"path": {"f"}}, ""},
		{"wrong header, right signature", "no", signed("f", opRead, "", ""), "access token present in header but does not match"},
		{"signature", "", signed("f", opRead, "", ""), ""},
		{"signature with user", "", signed("f", opRead, "tester", ""), ""},
		{"not yet expired", "", signed("f", opRead, "", "1000000"), ""},
		{"expired", "", signed("f", opRead, "", "999999"), "signature is already expired"},
		{"negative", "", signed("f", opRead, "", "-5"), "signature is already expired"},
		{"no number", "", signed("f", opRead, "", "soon"), "signature is already expired"},
		{"expiration taken away", "", signed("f", opRead, "", "999999", "signature_expiration", ""), "invalid signature"},
		{"other operation", "", signed("f", opWrite, "", ""), "invalid signature"},
		{"other path", "", signed("g", opRead, "", "", "path", "f"), "invalid signature"},
		{"other user", "", signed("f", opRead, "", "", "username", "tester"), "invalid signature"},
	} {
		resp, text := h.do("GET", test.q, nil, "X-Access-Token", test.header)
		want := ""
		if test.want != "" {
			want = fmt.Sprintf(`{"code":401,"message":%q}`, test.want)
		}
		if want == "" && resp.StatusCode != 200 || want != "" && (resp.StatusCode != 401 || strings.TrimSpace(text) != want) {
			t.Errorf("%s: %s %s", test.name, resp.Status, text)
		}
	}
	up := signed("new", opWrite, "", "")
	if resp, text := h.do("POST", up, strings.NewReader("x"), "Content-Type", "application/octet-stream"); resp.StatusCode != 200 {
		t.Errorf("signed upload: %s %s", resp.Status, text)
	}
}
